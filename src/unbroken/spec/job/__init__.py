"""The HyperPodPyTorchJob and the Incident: values, parser, rules, codec."""
