"""What is measured: one part of the benchmark each."""
