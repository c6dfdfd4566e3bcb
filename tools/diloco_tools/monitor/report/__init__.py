"""diloco-report: a run that its history tells of, as one page that needs nothing else."""
