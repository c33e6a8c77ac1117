"""The Kubernetes API seen from our side: client, informer, lease, event recorder."""
