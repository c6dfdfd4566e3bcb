"""`python -m diloco_tools.lan`."""

from diloco_tools.lan.cli import app

if __name__ == "__main__":
    app(prog_name="python -m diloco_tools.lan")
