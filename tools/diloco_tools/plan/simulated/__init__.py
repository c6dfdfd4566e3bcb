"""A run in virtual time: the real cores of broker and workers, with simulated links and work."""
