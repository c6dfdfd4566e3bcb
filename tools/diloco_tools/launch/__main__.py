"""`python -m diloco_tools.launch`: what `diloco-launch` starts."""

from diloco_tools.launch.cli import app

if __name__ == "__main__":
    app(prog_name="diloco-launch")
