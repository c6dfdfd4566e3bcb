"""A second broker for a run: it follows the hub, and can take its place."""
