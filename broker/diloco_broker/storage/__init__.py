"""The broker's files: checkpoints, model files, keys, history, audit log, tapes."""
