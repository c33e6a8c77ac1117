"""The HyperPodPyTorchJob and the Incident, which users write and read, as values; no I/O."""
