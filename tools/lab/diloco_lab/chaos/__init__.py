"""The chaos drill: a run that is killed, stopped, cut off and filled up, and then audited."""
