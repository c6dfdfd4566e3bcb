"""What the broker keeps on disk: checkpoints, model files, history, audit log."""
