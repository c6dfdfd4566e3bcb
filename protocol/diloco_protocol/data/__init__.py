"""Units of a data set: which there are, and in which order an epoch has them."""
