"""A second broker for a run, which follows the hub and can replace it.

`lease` has the rules: who may release versions, and who has to agree. `fence` applies them at the hub
and belongs to its sealed core; `core` applies them at the standby and is pure as well. `mirror` copies
checkpoints, `record` is the file in which a standby remembers its state, `daemon` is the process.
"""
