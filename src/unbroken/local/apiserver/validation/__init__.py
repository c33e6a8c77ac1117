"""Rules of built-in kinds beyond their schemas, in Kubernetes' words."""
