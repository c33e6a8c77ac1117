## Quickstart 2 of the README: a cluster on my laptop, with kubectl.
$ unbroken up --nodes 3 --detach
$ export KUBECONFIG=~/.unbroken/kubeconfig
$ kubectl create configmap train-lm --from-file=unbroken/examples/train_lm.py
> configmap/train-lm created
$ kubectl apply -f unbroken/examples/first_job.yaml
> /first created
~ kubectl get hpj first
> Running
~ kubectl logs first-worker-0
> step 10 loss
$ kubectl delete pod first-worker-1
> pod "first-worker-1" deleted
~ kubectl get incidents
> FAULT        POD              RANK   REMEDY   SECONDS   OUTCOME
> PodDeleted   first-worker-1
> recovered
$ unbroken explain first
> outcome    recovered
> no step lost; no sample repeated or skipped
$ unbroken down
