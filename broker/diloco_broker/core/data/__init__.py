"""The work queue: units of data sets, handed out and counted."""
