"""A second broker for a run: it follows the hub, and can take its place.

`lease` has what each of the two may do, and on whose word. `fence` is the hub's end of it, a part of its
sealed core; `core` is the standby's end, which is pure as well. `mirror` copies checkpoints, `record` is
what a standby remembers on its disk, `daemon` is its process.
"""
