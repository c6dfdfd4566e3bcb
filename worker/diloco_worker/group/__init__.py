"""A worker of several processes: process 0 leads, the others carry out what it decides."""
