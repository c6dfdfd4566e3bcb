"""The ways to make versions of pushes."""
