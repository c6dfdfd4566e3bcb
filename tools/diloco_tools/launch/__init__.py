"""`diloco-launch`: runs on this machine, on Slurm and on Kubernetes."""
