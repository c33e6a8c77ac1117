## The tutorial "Train with Ray on this machine" (docs/tutorials/ray.md), in the folder of the checkout.
## Needs: ray envsubst
$ unbroken up --nodes 4 --detach --image-env rayproject/ray=.ray-env
$ export KUBECONFIG=~/.unbroken/kubeconfig
$ envsubst < examples/ray/storage.yaml | kubectl apply -f -
> persistentvolumeclaim/fsx-claim created
$ kubectl get pvc fsx-claim
> fsx-claim
$ REGISTRY= envsubst < examples/ray/raycluster.yaml | kubectl apply -f -
> raycluster.ray.io/rayml created
$ kubectl wait raycluster/rayml --for=jsonpath='{.status.state}'=ready --timeout=120s
> condition met
$ kubectl get rayclusters,pods -o wide
> raycluster.ray.io/rayml
> Running
$ kubectl get service rayml-head-svc
> 8265/TCP
$ kubectl port-forward service/rayml-head-svc 8265:8265 > /dev/null 2>&1 &
$ kubectl get secret rayml-ray-token -o jsonpath='{.data.auth_token}' | base64 -d
! Error
$ export RAY_ADDRESS=http://localhost:8265 RAY_AUTH_MODE=token
$ export RAY_AUTH_TOKEN=$(kubectl get secret rayml-ray-token -o jsonpath='{.data.auth_token}' | base64 -d)
$ .ray-env/bin/ray job submit --working-dir examples/ray -- python3 where.py
> ran on ["127.
> succeeded
$ .ray-env/bin/ray job submit --no-wait --submission-id fsdp --working-dir examples/ray -- \
    python3 fsdp_ray.py --storage /fsx/runs --steps 2000
> Job 'fsdp' submitted successfully
## The tutorial reads on until Ctrl-C.
~ timeout 20 .ray-env/bin/ray job logs -f fsdp
> step 50 loss
$ kubectl delete pod $(kubectl get pods -l ray.io/node-type=worker -o jsonpath='{.items[0].metadata.name}')
> deleted
~ .ray-env/bin/ray job logs fsdp
> resumed at step
$ kubectl delete raycluster rayml
> deleted
$ unbroken down --purge
$ unset KUBECONFIG RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN
