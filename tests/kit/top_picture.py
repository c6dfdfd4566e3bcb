"""The picture of diloco-top on the front page: `make picture` draws it from the screen of the tests."""

import re

from kit.paths import ROOT
from kit.top_screen import ScreenPilot

FILE = ROOT / "docs" / "top.svg"
SIZE = (110, 25)
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # which would be fetched from elsewhere


def draw() -> str:
    """SVG of a run of five workers, one of which is lost."""
    pilot = ScreenPilot(SIZE)
    found: list[str] = []

    async def script() -> None:
        found.append(pilot.app.export_screenshot(title="diloco-top", simplify=True))

    pilot.play(script)
    return FONTS.sub("", found[0])


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
