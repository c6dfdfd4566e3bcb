"""`python -m diloco_tools.chaos` is the chaos drill."""

from diloco_tools.chaos.cli import app

app()
