"""Runs as the evidence needs them: what decides one, who computes when, many on one machine."""
