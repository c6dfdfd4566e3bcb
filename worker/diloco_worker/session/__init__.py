"""The state machine of a worker's conversation with the broker: events in, effects out. Pure."""
