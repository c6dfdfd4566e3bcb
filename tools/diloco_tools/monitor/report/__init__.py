"""diloco-report: a run's history as one self-contained page."""
