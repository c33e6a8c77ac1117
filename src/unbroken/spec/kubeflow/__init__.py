"""Kubeflow's PyTorchJob and TrainJob, and the config.yaml of the HyperPod CLI 2.x."""
