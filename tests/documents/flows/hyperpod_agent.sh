## HyperPod's own agent from PyPI in a HyperPodPyTorchJob without annotations: it starts, recovers
## from the loss of a worker, an agent and a node, is suspended and resumed, and completes.
## Different from the document: a program that only counts, without an image; the agent is given the
## torch of this environment (docs/guide/migrate-hyperpod.md has the launcher that it needs).
## Needs: hyperpodrun
$ unbroken up --nodes 3 --detach
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ cat > count.py <<'END'
import os
import pathlib
import time

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} is process {os.getpid()}", flush=True)
while not pathlib.Path(__file__).with_name("finish").exists():
    dist.barrier()
    time.sleep(0.1)
END
$ cat > job.yaml <<END
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  name: count
spec:
  nprocPerNode: "1"
  runPolicy:
    jobMaxRetryCount: 10
    restartPolicy:
      numRestartBeforeFullJobRestart: 3
      evalPeriodSeconds: 21600
      maxFullJobRestarts: 1
    cleanPodPolicy: "None"
  replicaSpecs:
    - name: pods
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: none
              command: [hyperpodrun, --nnodes=2, --nproc-per-node=1, --tee=3,
                        --log_dir=/tmp/hyperpod, $PWD/count.py]
END
$ kubectl apply -f job.yaml
> hyperpodpytorchjob.sagemaker.amazonaws.com/count created
~ kubectl get hyperpodpytorchjobs count
> Running
~ kubectl logs count-pods-1
> HyperPodElasticAgent
> rank 1 of 2 is process
$ kubectl get events
> AgentServedWithoutProof
! AgentNotProven
$ kill -9 $(kubectl logs count-pods-1 | sed -n 's/.*rank 1 of 2 is process //p')
~ kubectl get hyperpodpytorchjobs count -o jsonpath='{.status.restartCount} {.status.conditions[?(@.status=="True")].type}'
> 1
> Running
~ unbroken explain count
> count: Running, 1 restart
> WorkerCrash
> count-pods-1
> outcome    recovered
~ unbroken chaos kill-agent count --rank 0
> killed the agent of rank 0
~ unbroken explain count
> count: Running, 2 restarts
> A training worker process has crashed: Local Rank 0 exited with code -9
> culprit    pod count-pods-0
> refused the connection
> remedy     process: restart the processes in their pods
> outcome    recovered
~ unbroken chaos kill-node count --rank 1
> switched off the node of rank 1
~ unbroken explain count
> count: Running, 3 restarts
> culprit    pod count-pods-1
> remedy     pod: replace the pod, restart the other processes
> outcome    recovered
! waits for
$ unbroken chaos start-node $(kubectl get nodes | sed -n 's/ *NotReady.*//p')
> switched on
~ kubectl get nodes -o yaml
! node.kubernetes.io/
! unbroken.dev/fence:
$ kubectl patch hyperpodpytorchjob count --type merge -p '{"spec": {"runPolicy": {"suspend": true}}}'
~ kubectl get hyperpodpytorchjobs count
> Suspended
~ kubectl get pods
! count-pods
$ kubectl patch hyperpodpytorchjob count --type merge -p '{"spec": {"runPolicy": {"suspend": false}}}'
~ kubectl get hyperpodpytorchjobs count
> Running
~ kubectl logs count-pods-0
> rank 0 of 2 is process
$ touch finish
~ kubectl get hyperpodpytorchjobs count
> Completed
$ unbroken down
