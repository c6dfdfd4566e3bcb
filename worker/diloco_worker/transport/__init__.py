"""The I/O thread of a worker, its sockets, and what it shares with the training thread."""
