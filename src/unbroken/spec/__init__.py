"""What users write and read: the HyperPodPyTorchJob and the Incident, as values; no I/O."""
