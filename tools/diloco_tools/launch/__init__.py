"""`diloco-launch`: a run on the cluster that somebody already has, by files of its engine."""
