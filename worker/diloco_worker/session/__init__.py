"""The state machine of a worker's connection: events in, effects out. Pure."""
