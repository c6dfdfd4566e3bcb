"""python -m diloco_tools.evidence"""

from diloco_tools.evidence.cli import app

app()
