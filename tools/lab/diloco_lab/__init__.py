"""The lab: measures, breaks and releases the product. It is run from a checkout, not in the wheel."""
