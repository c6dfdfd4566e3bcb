"""`python -m diloco_broker` is `diloco-broker`."""

from diloco_broker.cli.app import app

app()
