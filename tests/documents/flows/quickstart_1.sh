## Quickstart 1 of the README: a torchrun script in my environment.
## Different: the job's terminal is a file, since a flow has one terminal only.
$ cp unbroken/examples/train_lm.py train.py
$ unbroken run --nnodes 2 --nproc-per-node 2 train.py --checkpoint-dir ckpt > run.txt 2>&1 &
~ cat run.txt
> unbroken: train: Running (attempt 0 runs on 2 nodes)
> step 150 loss
$ unbroken chaos kill-worker train --rank 3
~ unbroken explain train
> train: Running, 1 restart
> culprit    rank 3 (train-pods-1 on node-1)
> what       killed by SIGKILL
> remedy     process: restart the processes in their pods
> outcome    recovered
~ cat run.txt
> resumed at step 150
> rank 3 (train-pods-1 on node-1): killed by SIGKILL; restarted the processes
> step 599 loss
> unbroken: train: Completed (all 2 agents completed attempt 1)
$ unbroken down
