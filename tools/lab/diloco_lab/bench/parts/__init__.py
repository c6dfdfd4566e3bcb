"""What is measured: each public function with a pool of processes is a part of the benchmark.

Its first sentence and its keywords are those of its command; see `bench.__main__`.
"""
