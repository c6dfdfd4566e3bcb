"""`python -m diloco_lab.sites`."""

from diloco_lab.sites.cli import app

if __name__ == "__main__":
    app(prog_name="python -m diloco_lab.sites")
