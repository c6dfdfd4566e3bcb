"""Work units of a data set: sets of them, and their order in an epoch."""
