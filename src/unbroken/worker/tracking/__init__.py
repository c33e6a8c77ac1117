"""One run of an experiment tracker over all restarts of a job: `worker.track(mlflow)`.

`run` is what a script calls, and the thread that writes; `mlflow` and `wandb` are the trackers,
whose modules the script gives. `history` puts the job's incidents into tags and metrics.
"""
