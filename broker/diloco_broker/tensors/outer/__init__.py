"""Outer optimizers: built-in ones that step chunks, and any of `torch.optim`."""
