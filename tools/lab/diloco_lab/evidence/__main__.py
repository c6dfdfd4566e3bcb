"""Run the evidence: `python -m diloco_lab.evidence`."""

from diloco_lab.evidence.cli import COMMAND, app

app(prog_name=COMMAND)
