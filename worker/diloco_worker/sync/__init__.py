"""What is decided after each optimizer step, pure: `boundary` is where to begin."""
