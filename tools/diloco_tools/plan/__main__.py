"""`python -m diloco_tools.plan` is `diloco-plan`."""

from diloco_tools.plan.cli import app

if __name__ == "__main__":
    app(prog_name="diloco-plan")
