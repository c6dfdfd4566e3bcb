"""`python -m diloco_broker` is `diloco-broker`."""

from diloco_broker.cli import app

app()
