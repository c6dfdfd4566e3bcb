"""`diloco-launch`: a run on this machine, or on a cluster by files of its engine."""
