"""What the broker hands out of data sets."""
