"""Auto-resume of Kubeflow's PyTorchJobs after the loss of a node."""
