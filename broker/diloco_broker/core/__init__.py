"""The state machine of the broker: events in, effects out. No clock, socket, thread, file or tensor."""
