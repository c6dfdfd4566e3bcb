"""diloco-top: the state of a run in a terminal."""
