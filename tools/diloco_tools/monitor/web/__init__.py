"""diloco-dashboard: the state of a run on a web page, and the controls of its broker."""
