"""`diloco-worker doctor`: checks and measures the connection to the broker."""
