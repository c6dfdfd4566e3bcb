"""Status, commands and settings of operators, and the end of a run."""
