"""The work queue: hands out units of data sets, and counts them."""
