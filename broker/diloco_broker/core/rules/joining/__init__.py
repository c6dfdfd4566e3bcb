"""Who takes part: what is asked of those who want to, and what their keys are good for."""
