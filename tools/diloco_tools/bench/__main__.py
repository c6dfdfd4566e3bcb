"""`python -m diloco_tools.bench` is `diloco-bench`."""

from diloco_tools.bench.cli import app

app()
