"""A run on Kubernetes: manifests for `kubectl apply -f -`. Not run on a cluster yet."""
