"""The feed as monitors read it: live, or recorded."""
