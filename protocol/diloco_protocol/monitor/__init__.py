"""What every display of a run has in common: its fields, its rows, its verdict. Pure."""
