"""What the child processes of the benchmark do."""
