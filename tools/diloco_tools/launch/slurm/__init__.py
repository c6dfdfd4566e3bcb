"""A run as jobs of Slurm: one job for the broker, and an array with one job for each island."""
