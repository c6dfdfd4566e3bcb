"""Run the evidence: `python -m diloco_lab.evidence`."""

from diloco_lab.evidence.cli import COMMAND, app

if __name__ == "__main__":
    app(prog_name=COMMAND)
