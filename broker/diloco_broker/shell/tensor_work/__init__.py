"""Executes the tensor work of the core: a queue, optional threads, and the executor."""
