"""The parts of the benchmark: functions that measure with a pool of processes."""
