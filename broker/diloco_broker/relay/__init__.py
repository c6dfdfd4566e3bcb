"""A broker at each site: `core` joins the two pure cores, the rest is its shell."""
