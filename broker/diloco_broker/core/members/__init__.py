"""Workers: admission, liveness, and the parameters that they upload to a new broker."""
