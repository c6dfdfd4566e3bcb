"""`python -m diloco_tools.monitor.web`, for programs that start the dashboard as a child."""

from diloco_tools.monitor.web.cli import app

app(prog_name="diloco-dashboard")
