"""What is measured: each function with a pool of processes is a part of the benchmark."""
