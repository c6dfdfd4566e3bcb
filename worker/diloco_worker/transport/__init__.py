"""The I/O thread of a worker, its sockets, and the data shared with the training thread."""
