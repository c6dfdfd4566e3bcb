"""Work on tensors: decoding, adding up, outer steps, encoding; a chunk at a time."""
