"""An API server that speaks the Kubernetes API, over SQLite."""
