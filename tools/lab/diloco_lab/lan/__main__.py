"""`python -m diloco_lab.lan`."""

from diloco_lab.lan.cli import app

if __name__ == "__main__":
    app(prog_name="python -m diloco_lab.lan")
