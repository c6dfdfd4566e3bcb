"""A run as jobs of Slurm: one of the broker, and an array with one for each island."""
