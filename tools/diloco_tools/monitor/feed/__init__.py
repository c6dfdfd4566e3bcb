"""Readers of the feed, live or recorded."""
