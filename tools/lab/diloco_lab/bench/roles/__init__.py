"""The roles of the benchmark's child processes."""
