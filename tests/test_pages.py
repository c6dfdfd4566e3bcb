"""The pages: links lead somewhere, and files and tests that are named exist."""

import re
from pathlib import Path

import pytest

from kit.paths import ROOT

FOLDERS = [ROOT / name for name in (".github", "docs")]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
# A path of ours in backticks: `broker/diloco_broker/core/machine.py`, `tests/kit`.
NAMED = re.compile(r"`((?:protocol|broker|worker|tools|tests)/[\w/.-]+)`")


def without_code(page: Path) -> str:
    text = page.read_text()
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_are_there(page: Path) -> None:
    text = without_code(page)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    for path in NAMED.findall(text):
        places = (ROOT / path, page.parent / f"{path}.py")  # a test, by its place beside the page
        missing += [path] * (not any(place.exists() for place in places))
    assert not missing


def test_tests_that_pages_name_are_there() -> None:
    modules = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in modules}
    for path in modules:
        known |= set(re.findall(r"def (test_\w+)", path.read_text()))
    named = {
        name for page in PAGES for name in re.findall(r"`(?:\w+/)*(test_\w+)", page.read_text())
    }
    assert named and named <= known
