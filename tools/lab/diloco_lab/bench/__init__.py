"""Measure the limits of this machine and what the product makes of them, as ratios."""
