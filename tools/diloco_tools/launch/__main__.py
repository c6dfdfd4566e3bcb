"""`python -m diloco_tools.launch` is `diloco-launch`."""

from diloco_tools.launch.cli import app

if __name__ == "__main__":
    app(prog_name="diloco-launch")
