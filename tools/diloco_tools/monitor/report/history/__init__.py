"""From a run's files to the facts of a report: one pass over the lines, in bounded memory."""
