"""A worker of several processes: process 0 leads, the others execute its decisions."""
