"""TrainJobs of the runtime `unbroken-torch`, run as HyperPodPyTorchJobs."""
