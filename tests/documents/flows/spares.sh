## The developer guide on running jobs: a spare pod takes the place of a lost one.
## Different from the document: no Kueue is installed, so the queue's label has no effect; a program
## that only waits, without an image.
$ unbroken up --nodes 2 --detach
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ cat > train.py <<'END'
import os
import pathlib
import time

print("rank", os.environ["RANK"], "in", os.environ["UNBROKEN_POD"], flush=True)
while not pathlib.Path(__file__).with_name("finish").exists():
    time.sleep(0.1)
END
$ cat > job.yaml <<END
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  labels:
    kueue.x-k8s.io/queue-name: user-queue # Specify the queue to run the job.
  name: hyperpodpytorchjob-sample
spec:
  nprocPerNode: "1"
  runPolicy:
    cleanPodPolicy: "None"
  replicaSpecs:
    - name: pods
      replicas: 1
      spares: 1 # Specify how many spare nodes to reserve.
      template:
        spec:
          containers:
            - name: pytorch
              image: none
              imagePullPolicy: Always
              command: [hyperpodrun, --nnodes=1, --nproc-per-node=1, $PWD/train.py]
              ports:
                - containerPort: 8080
              resources:
                requests:
                  nvidia.com/gpu: "0"
                limits:
                  nvidia.com/gpu: "0"
END
$ kubectl apply -f job.yaml
> hyperpodpytorchjob.sagemaker.amazonaws.com/hyperpodpytorchjob-sample created
~ kubectl get hyperpodpytorchjobs
> Running   1/1     1
~ kubectl logs hyperpodpytorchjob-sample-pods-0
> rank 0 in hyperpodpytorchjob-sample-pods-0
$ kubectl delete pod hyperpodpytorchjob-sample-pods-0
~ kubectl logs hyperpodpytorchjob-sample-pods-1
> rank 0 in hyperpodpytorchjob-sample-pods-1
~ kubectl get incidents
> PodDeleted
> recovered
$ touch finish
~ kubectl get hyperpodpytorchjobs
> Completed
$ unbroken down
