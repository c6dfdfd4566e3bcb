"""A run on this machine alone: a broker and the workers of one script."""
