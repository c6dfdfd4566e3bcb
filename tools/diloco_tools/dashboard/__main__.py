"""`python -m diloco_tools.dashboard`, for programs that start the dashboard as a child."""

from diloco_tools.dashboard.cli import app

app(prog_name="diloco-dashboard")
