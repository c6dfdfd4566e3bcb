"""Rounds: their pushes, the decision to close them, and the outer step."""
