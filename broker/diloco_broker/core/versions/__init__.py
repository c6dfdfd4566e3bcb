"""The versions of the fragments: made, read, remembered and saved."""
