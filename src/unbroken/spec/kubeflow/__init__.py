"""Kubeflow's PyTorchJob, and the config.yaml of the HyperPod CLI 2.x."""
