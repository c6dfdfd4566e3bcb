"""Rounds: what they are made of, and when they close."""
