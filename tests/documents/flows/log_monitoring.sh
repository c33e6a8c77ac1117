## The developer guide on running jobs: log rules restart a job that is slow, and one that hangs.
## Different from the document: names and sizes in place of XXX; 2 pods instead of 16 and 2 processes
## in each; 20 s instead of 300 s without a batch, and no rule on checkpoints; a program that prints
## the lines of the rules: slow in its first attempt, silent in its second.
$ unbroken up --nodes 2 --detach --instance-type ml.p5.48xlarge --resource hugepages-2Mi=10Gi
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ cat > train.py <<'END'
import itertools
import os
import pathlib
import time

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("Experiment configuration: none", flush=True)
for batch in itertools.count():
    if attempt != 1 or batch < 5:
        speed = 50.0 if attempt == 0 else 100.0
        print(f"[Epoch 0 Batch {batch} {{'training_loss_step': 2.5}}", flush=True)
        print(f"[Epoch 0 Batch {batch} {{'samples/sec': {speed}}}", flush=True)
    if pathlib.Path(__file__).with_name("finish").exists():
        break
    time.sleep(0.2)
END
$ cat > job.yaml <<END
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  labels:
    app.kubernetes.io/name: HyperPod
    app.kubernetes.io/managed-by: kustomize
  name: &jobname monitored
spec:
  nprocPerNode: "2"
  replicaSpecs:
    - name: pods
      replicas: 2
      template:
        spec:
          nodeSelector:
            beta.kubernetes.io/instance-type: ml.p5.48xlarge
          containers:
            - name: pytorch
              image: none
              imagePullPolicy: Always
              command: [hyperpodrun, --nnodes=2, --nproc-per-node=2, --tee=3, $PWD/train.py]
              ports:
                - containerPort: 8080 # This is the port that HyperPodElasticAgent listens to
              resources:
                limits:
                  nvidia.com/gpu: 8
                  hugepages-2Mi: 5120Mi
                requests:
                  nvidia.com/gpu: 8
                  hugepages-2Mi: 5120Mi
                  memory: 32000Mi
  runPolicy:
    jobMaxRetryCount: 50
    restartPolicy:
      numRestartBeforeFullJobRestart: 3
      evalPeriodSeconds: 21600
      maxFullJobRestarts: 1
    cleanPodPolicy: "All"
    logMonitoringConfiguration:
      - name: "JobStart"
        logPattern: ".*Experiment configuration.*" # This is the start of the training script
        expectedStartCutOffInSeconds: 120 # Expected match in the first 2 minutes
      - name: "JobHangingDetection"
        logPattern: ".*\\[Epoch 0 Batch \\d+.*'training_loss_step': (\\d+(\\.\\d+)?).*"
        expectedRecurringFrequencyInSeconds: 20
        expectedStartCutOffInSeconds: 600 # Allow 10 minutes of job startup time
      - name: "LowThroughputDetection"
        logPattern: ".*\\[Epoch 0 Batch \\d+.*'samples\\/sec': (\\d+(\\.\\d+)?).*"
        metricThreshold: 80 # 80 samples/sec
        operator: "lteq"
        metricEvaluationDataPoints: 25 # if throughput lower than threshold for 25 datapoints, kill the job
END
$ sed -i 's/[\\]/\\\\/g' job.yaml
$ kubectl apply -f job.yaml
> hyperpodpytorchjob.sagemaker.amazonaws.com/monitored created
~ kubectl get incidents -o yaml
> LogSlow_LowThroughputDetection
> LogHang_JobHangingDetection
~ kubectl logs monitored-pods-0
> [Epoch 0 Batch 30 {'samples/sec': 100.0}
~ unbroken explain monitored
> monitored: Running, 2 restarts
> outcome    recovered
$ touch finish
~ kubectl get hyperpodpytorchjobs monitored
> Completed
$ unbroken down
