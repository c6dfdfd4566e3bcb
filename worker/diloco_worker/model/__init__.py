"""The model as flat vectors: captured, changed, watched."""
