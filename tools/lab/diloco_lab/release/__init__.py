"""Checks of a release: no known vulnerability in its dependencies, and reproducible files."""
