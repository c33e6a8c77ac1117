"""The cluster API: SageMaker's operations on clusters and nodes, for the aws CLI and boto3.

It reads and writes `Cluster` objects and remembers nothing; `operator/clusters` does the
work.
"""
