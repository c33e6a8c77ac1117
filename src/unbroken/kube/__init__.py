"""The client side of the Kubernetes API: client, informer, lease, event recorder."""
