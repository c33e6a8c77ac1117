## HyperPod on EKS: a cluster whose new nodes are checked first, and a job on it.
## Different from the document: an instance type without GPUs, because a node whose GPUs cannot be
## tested does not pass; no AWS account is behind the role and the subnets; 2 workers instead of 4;
## 2 replicas instead of 10, of a program that only adds ranks up.
## Needs: aws
$ mkdir lifecycle
$ cat > lifecycle/on_create.sh <<'END'
#!/bin/bash
echo "OnCreate of $(hostname) has run"
END
$ unbroken up --nodes 0 --detach --lifecycle-source s3://sagemaker-bucket/lifecycle=./lifecycle
$ export KUBECONFIG=$PWD/.unbroken/kubeconfig
$ export $(unbroken status | sed -n 's/^export \(AWS_.*\)/\1/p')
$ cat > cluster-config.json <<'END'
{
  "ClusterName": "ml-cluster",
  "Orchestrator": {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:111122223333:cluster/ml-eks"}},
  "InstanceGroups": [
    {"InstanceGroupName": "worker-group-1", "InstanceType": "ml.c5.4xlarge", "InstanceCount": 2,
     "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-bucket/lifecycle",
                         "OnCreate": "on_create.sh"},
     "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod", "ThreadsPerCore": 1,
     "OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"]}
  ],
  "VpcConfig": {"SecurityGroupIds": ["sg-0123456789abcdef0"],
                "Subnets": ["subnet-0123456789abcdef0"]},
  "NodeRecovery": "Automatic"
}
END
$ aws sagemaker create-cluster --cli-input-json file://cluster-config.json
> "ClusterArn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/
$ aws sagemaker list-clusters --output table
> ml-cluster
~ aws sagemaker describe-cluster --cluster-name ml-cluster
> "ClusterStatus": "InService"
$ kubectl get nodes --show-labels
> sagemaker.amazonaws.com/deep-health-check-status=Passed
> sagemaker.amazonaws.com/node-health-status=Schedulable
! sagemaker.amazonaws.com/node-health-status=Unschedulable
! sagemaker.amazonaws.com/deep-health-check-status=InProgress
$ kubectl get nodes -o jsonpath='{.items[*].spec.taints}'
! node-health-status
$ cat > sum.py <<'END'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("sum of all ranks:", total.item())
END
$ cat > fsdp.yaml <<END
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: fsdp
  namespace: kubeflow
  annotations:
    sagemaker.amazonaws.com/enable-job-auto-resume: "true"
    sagemaker.amazonaws.com/job-max-retry-count: "2"
spec:
  elasticPolicy:
    rdzvBackend: c10d
    minReplicas: 1
    maxReplicas: 64
    maxRestarts: 100
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector:
            sagemaker.amazonaws.com/node-health-status: Schedulable
          containers:
            - name: pytorch
              image: none
              command: [torchrun, --nnodes=2, --nproc_per_node=1, $PWD/sum.py]
END
$ kubectl apply -f fsdp.yaml
> pytorchjob.kubeflow.org/fsdp created
~ kubectl get pytorchjob fsdp -n kubeflow -o jsonpath='{.status.conditions[-1:].type}'
> Succeeded
$ kubectl logs fsdp-worker-0 -n kubeflow
> sum of all ranks: 3
$ aws sagemaker delete-cluster --cluster-name ml-cluster
> "ClusterArn"
