"""Outer optimizers: by chunks, and any of `torch.optim`."""
