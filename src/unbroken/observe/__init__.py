"""What is told about the cluster to those who watch it: metrics."""
