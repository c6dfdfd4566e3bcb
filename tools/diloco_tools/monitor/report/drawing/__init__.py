"""Markup and SVG: pure functions from facts to text."""
