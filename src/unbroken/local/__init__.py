"""A Kubernetes cluster in one process: API server, scheduler, controllers, nodes."""
