"""Runs over lines of a limited rate, as an office or a home has them: what a sync takes there."""
