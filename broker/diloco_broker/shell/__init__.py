"""The one thread of the broker: sockets, clock, and carrying out what the core asks for."""
