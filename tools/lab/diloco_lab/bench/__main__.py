"""Run the benchmark: `python -m diloco_lab.bench`."""

from diloco_lab.bench.cli import COMMAND, app

if __name__ == "__main__":
    app(prog_name=COMMAND)
