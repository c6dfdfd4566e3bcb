"""Tensor work, one chunk at a time: decoding, summation, outer steps, encoding."""
