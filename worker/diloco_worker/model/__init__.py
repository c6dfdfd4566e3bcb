"""The model as flat vectors: what is captured, what is put back, what has changed."""
