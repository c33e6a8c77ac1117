## The training operator's own example: the FSDP manifest by envsubst, kubectl, and the clean-up.
## Different from the document: a program that prints the lines which the manifest's rules wait for,
## without an image and its data; 2 GPUs in a node instead of 8; the nodes have the label that the
## manifest selects (docs/guide/migrate-hyperpod.md).
## Needs: envsubst
$ unbroken up --nodes 2 --detach --instance-type ml.p5.48xlarge --label sagemaker.amazonaws.com/compute-type=ml.p5.48xlarge
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ export NUM_NODES=2 INSTANCE_TYPE=ml.p5.48xlarge GPU_PER_NODE=2 EFA_PER_NODE=32 FI_PROVIDER=efa IMAGE_URI=none HF_TOKEN=hf_none
$ cat > train.py <<'END'
import itertools
import pathlib
import time

for batch in itertools.count():
    print(f"Batch {batch} Loss: 2.5", flush=True)
    if pathlib.Path("FOLDER/finish").exists():
        break
    time.sleep(0.5)
END
$ sed -i "s|FOLDER|$PWD|" train.py
$ cat > llama3_1_8b-fsdp-hpto.yaml <<'END'
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  name: llama3-1-8b-fsdp-hpto
spec:
  nprocPerNode: "$GPU_PER_NODE"
  runPolicy:
    jobMaxRetryCount: 10
    restartPolicy:
      numRestartBeforeFullJobRestart: 3
      evalPeriodSeconds: 21600
      maxFullJobRestarts: 1
    cleanPodPolicy: All
    logMonitoringConfiguration:
      - name: JobStart
        logPattern: '.*Loss:.*'
        expectedStartCutOffInSeconds: 240
      - name: JobHangingDetection
        logPattern: '.*Loss:.*'
        expectedRecurringFrequencyInSeconds: 600
  replicaSpecs:
    - name: pods
      replicas: $NUM_NODES
      template:
        metadata:
          labels:
            job-name: llama3-1-8b-fsdp-hpto
            replica-type: pods
        spec:
          volumes:
            - name: shmem
              hostPath:
                path: /dev/shm
            - name: local
              hostPath:
                path: /mnt/k8s-disks/0
          affinity:
            podAntiAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                - labelSelector:
                    matchLabels:
                      job-name: llama3-1-8b-fsdp-hpto
                  topologyKey: kubernetes.io/hostname
            nodeAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms:
                  - matchExpressions:
                      - key: sagemaker.amazonaws.com/node-health-status
                        operator: In
                        values:
                          - Schedulable
                      - key: sagemaker.amazonaws.com/compute-type
                        operator: In
                        values:
                          - '${INSTANCE_TYPE}'
          topologySpreadConstraints:
            - maxSkew: 1
              topologyKey: kubernetes.io/hostname
              whenUnsatisfiable: DoNotSchedule
              labelSelector:
                matchLabels:
                  job-name: llama3-1-8b-fsdp-hpto
          containers:
            - name: pytorch
              image: ${IMAGE_URI}
              imagePullPolicy: Always
              resources:
                requests:
                  nvidia.com/gpu: $GPU_PER_NODE
                  vpc.amazonaws.com/efa: $EFA_PER_NODE
                limits:
                  nvidia.com/gpu: $GPU_PER_NODE
                  vpc.amazonaws.com/efa: $EFA_PER_NODE
              env:
                - name: LOGLEVEL
                  value: INFO
                - name: FI_PROVIDER
                  value: efa
                - name: FI_EFA_USE_DEVICE_RDMA
                  value: '1'
                - name: FI_EFA_FORK_SAFE
                  value: '1'
                - name: FI_EFA_ENABLE_SHM_TRANSFER
                  value: '1'
                - name: TORCH_DISTRIBUTED_DEBUG
                  value: DETAIL
                - name: TORCH_NCCL_ENABLE_MONITORING
                  value: '1'
                - name: TORCH_NCCL_TRACE_BUFFER_SIZE
                  value: '20000'
                - name: TORCH_NCCL_DUMP_ON_TIMEOUT
                  value: '1'
                - name: TORCH_NCCL_DEBUG_INFO_TEMP_FILE
                  value: /local/nccl_trace_rank_
                - name: PYTORCH_CUDA_ALLOC_CONF
                  value: 'expandable_segments:True'
                - name: NCCL_DEBUG
                  value: INFO
                - name: NCCL_SOCKET_IFNAME
                  value: ^lo
                - name: TORCH_NCCL_ASYNC_ERROR_HANDLING
                  value: '1'
                - name: HF_TOKEN
                  value: '${HF_TOKEN}'
              command:
                - hyperpodrun
                - '--tee=3'
                - '--log_dir=/tmp/hyperpod'
                - '--nproc_per_node=$GPU_PER_NODE'
                - '--nnodes=$NUM_NODES'
                - /fsdp/train.py
                - '--max_context_width=4096'
                - '--num_key_value_heads=40'
                - '--intermediate_size=13824'
                - '--hidden_width=5120'
                - '--num_layers=40'
                - '--num_heads=40'
                - '--model_type=llama_v2'
                - '--tokenizer=hf-internal-testing/llama-tokenizer'
                - '--checkpoint_freq=50'
                - '--validation_freq=25'
                - '--max_steps=1000'
                - '--checkpoint_dir=./checkpoints'
                - '--dataset=allenai/c4'
                - '--dataset_config_name=en'
                - '--resume_from_checkpoint=./checkpoints'
                - '--train_batch_size=1'
                - '--val_batch_size=1'
                - '--sharding_strategy=full'
                - '--offload_activations=1'
              volumeMounts:
                - name: shmem
                  mountPath: /dev/shm
                - name: local
                  mountPath: /local
END
$ sed -i "s|/fsdp/train.py|$PWD/train.py|" llama3_1_8b-fsdp-hpto.yaml
$ envsubst < llama3_1_8b-fsdp-hpto.yaml | kubectl apply -f -
> hyperpodpytorchjob.sagemaker.amazonaws.com/llama3-1-8b-fsdp-hpto created
~ kubectl get hyperpodpytorchjobs
> NAME
> llama3-1-8b-fsdp-hpto
> Running
$ kubectl get pods
> llama3-1-8b-fsdp-hpto-pods-0
> llama3-1-8b-fsdp-hpto-pods-1
> Running
~ kubectl logs llama3-1-8b-fsdp-hpto-pods-0
> [default0]:Batch 3 Loss: 2.5
> [default1]:Batch 3 Loss: 2.5
$ unbroken chaos kill-worker llama3-1-8b-fsdp-hpto --rank 3
~ unbroken explain llama3-1-8b-fsdp-hpto
> Running, 1 restart
> rank 3 (llama3-1-8b-fsdp-hpto-pods-1 on
> outcome    recovered
$ touch finish
~ kubectl get hyperpodpytorchjobs
> Completed
$ kubectl delete hyperpodpytorchjobs --all
> "llama3-1-8b-fsdp-hpto" deleted
~ kubectl get pods
> No resources found
$ unbroken down
