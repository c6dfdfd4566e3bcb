"""Run over slow lines: `python -m diloco_lab.network lan` and `python -m diloco_lab.network sites`."""

from diloco_lab.network.cli import COMMAND, app

if __name__ == "__main__":
    app(prog_name=COMMAND)
