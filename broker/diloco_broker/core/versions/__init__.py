"""Versions of the fragments: released, sent to readers, and saved."""
