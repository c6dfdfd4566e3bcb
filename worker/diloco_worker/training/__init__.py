"""What belongs to the training thread: boundaries, waiting, merging, saved state."""
