"""The command line of a worker: `diloco-worker`."""
