"""`unbroken hyperpod`: the commands of the HyperPod CLI 2.x."""
