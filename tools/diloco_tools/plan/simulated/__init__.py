"""A run in virtual time: the real cores of broker and workers, and lines and work that take time."""
