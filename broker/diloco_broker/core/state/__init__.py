"""What the broker knows: records, each with the methods that change it."""
