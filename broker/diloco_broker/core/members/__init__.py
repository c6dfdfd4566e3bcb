"""Who takes part: joining, signs of life, and the parameters that newcomers bring."""
