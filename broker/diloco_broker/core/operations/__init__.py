"""What operators see and change, and how a run ends."""
