"""Connections between the processes of one worker, and of those that do not lead to the broker."""
