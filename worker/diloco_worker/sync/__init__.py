"""The decisions after each optimizer step, pure; start reading at `boundary`."""
