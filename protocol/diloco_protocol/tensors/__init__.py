"""Code that uses torch: codecs of chunks, memory for them, and conversion of state dicts."""
