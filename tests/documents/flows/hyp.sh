## The life of a training job with HyperPod's client `hyp`: created, listed, described, read, deleted.
## Different from the document: no image; a program that only prints its rank; the log of one pod.
## Needs: hyp
$ unbroken up --nodes 2 --detach
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ export COLUMNS=200
$ cat > train.py <<'END'
import os
import pathlib
import time

print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not pathlib.Path(__file__).with_name("finish").exists():
    time.sleep(0.1)
END
$ hyp create hyp-pytorch-job --job-name sample --image none --replica-count 2 --tasks-per-node 2 --max-retry 5 --command "[/bin/sh, -c, hyperpodrun --nnodes=\$NNODES --nproc-per-node=\$NPROC_PER_NODE --tee=3 $PWD/train.py]"
~ hyp list hyp-pytorch-job
> sample
> default
> Running
$ hyp describe hyp-pytorch-job --job-name sample
> sample
> Running
$ hyp list-pods hyp-pytorch-job --job-name sample
> sample-pod-0
> sample-pod-1
~ hyp get-logs hyp-pytorch-job --job-name sample --pod-name sample-pod-1
> rank 2 of 4
> rank 3 of 4
~ hyp get-operator-logs hyp-pytorch-job --since-hours 1
> unbroken.operator.jobs
$ touch finish
~ hyp list hyp-pytorch-job
> Completed
$ hyp delete hyp-pytorch-job --job-name sample
~ hyp list hyp-pytorch-job
> No jobs found
$ unbroken down
