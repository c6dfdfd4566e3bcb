"""Attacks on a live broker beside a training run: what got through, and what they cost."""
