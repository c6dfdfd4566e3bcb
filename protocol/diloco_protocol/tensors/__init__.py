"""What touches tensors: how chunks are encoded, memory for them, chunks of a state dict."""
