"""`python -m diloco_tools.demo` is `diloco-demo`."""

from diloco_tools.demo.cli import app

app()
