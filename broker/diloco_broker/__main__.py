"""Run `diloco-broker` as `python -m diloco_broker`."""

from diloco_broker.cli.app import app

app()
