"""The broker's main thread: sockets, clock, and execution of the core's effects."""
