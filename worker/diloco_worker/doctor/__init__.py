"""`diloco-worker doctor`: what stands between this machine and its broker."""
