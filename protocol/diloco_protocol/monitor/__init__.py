"""The common parts of all displays of a run: its fields, its rows, its verdict. Pure."""
