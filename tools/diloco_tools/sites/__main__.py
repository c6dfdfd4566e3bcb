"""`python -m diloco_tools.sites`."""

from diloco_tools.sites.cli import app

if __name__ == "__main__":
    app(prog_name="python -m diloco_tools.sites")
