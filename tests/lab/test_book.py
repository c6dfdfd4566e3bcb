"""The pages as a book: all of them are in it, in one order, and nothing in it leads nowhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_lab.release import book
from diloco_protocol.errors import UsageError
from kit.paths import ROOT

SPHINX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="Sphinx, MyST or furo is not installed: make docs",
)


def write(root: Path, **pages: str) -> Path:
    """A small repository with these pages; `docs__top` is docs/top.md."""
    for name, text in pages.items():
        path = root / (name.replace("__", "/") + ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def adapted(root: Path, page: str) -> str:
    return book.adapted(root, page, (root / page).read_text(), book.pages(root))


def made_in(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_lab.release.book", "--to", str(to)]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=100, check=False
    )


def a_front(*targets: str) -> str:
    """A front page with a table of these pages."""
    links = ", ".join(f"[it]({target})" for target in targets)
    return f"# One\n\n## The book\n\n| chapter | pages |\n| --- | --- |\n| All | {links} |\n\n"


def test_every_page_is_in_a_chapter_once() -> None:
    listed = [page for chapter in book.chapters(ROOT).values() for page in chapter]
    assert len(listed) == len(set(listed))
    assert set(book.pages(ROOT)) == set(listed), "none of them is missing"
    assert listed[0] == "README.md"


def test_page_that_is_in_no_chapter_is_named(tmp_path: Path) -> None:
    write(tmp_path, README="# One", docs__new="# New")
    with pytest.raises(UsageError, match=r"docs/new.md would be in no chapter"):
        book.pages(tmp_path)


def test_links_to_what_is_no_page_are_text_and_code_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "tools").mkdir()
    code = "```text\n[a](x.py)\n```\n\n    [a](x.py)\n"
    links = "[x.py](x.py), [tools/](tools), [`run`](x.py), [the code](x.py) and `[no](x.py)`\n"
    front = a_front("docs/top.md")
    write(
        tmp_path, README=links + code + front, docs__top="[a](../README.md#b) ![p](p.png) [b](#b)"
    )
    assert adapted(tmp_path, "README.md").startswith(
        f"`x.py`, `tools/`, `run`, the code and `[no](x.py)`\n{code}"
    )
    assert adapted(tmp_path, "docs/top.md") == "[a](../README.md#b) ![p](p.png) [b](#b)"


@SPHINX
@pytest.mark.parametrize("target", ["SECURITY.md#locks", "locks.md"])
def test_link_that_leads_nowhere_ends_the_build(tmp_path: Path, target: str) -> None:
    text = f"[a](SECURITY.md#keys) [b]({target})\n\n{a_front('SECURITY.md')}"
    write(tmp_path, README=text, SECURITY="# Keys")
    done = made_in(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    (fault,) = done.stderr.splitlines()[1:]
    assert fault.startswith("README.md:1: WARNING") and "locks" in fault
    assert not (tmp_path / "site").exists()


@SPHINX
def test_all_pages_make_a_book_without_a_warning(tmp_path: Path) -> None:
    before = set(ROOT.iterdir())
    done = made_in(ROOT, tmp_path / "site")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(ROOT.iterdir()) == before, "nothing is written beside the pages"
    made = {path.relative_to(tmp_path / "site") for path in tmp_path.rglob("*.html")}
    wanted = {Path(page).with_suffix(".html") for page in book.pages(ROOT)}
    former = {Path(f"{old}.html") for old in book.MOVED}
    assert wanted | former <= made and not wanted & former
    for path in former:
        (target,) = re.findall(r"url=([^\"]+)", (tmp_path / "site" / path).read_text())
        to = (tmp_path / "site" / path.parent / target).resolve()
        assert to.relative_to((tmp_path / "site").resolve()) in wanted
    for path in made:
        text = (tmp_path / "site" / path).read_text()
        # It can be read without a network, and from a disk.
        assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', text), path
    shown = {path.name for path in (tmp_path / "site" / "_images").iterdir()}
    told = "".join((ROOT / page).read_text() for page in book.pages(ROOT))
    assert shown == {Path(each).name for each in re.findall(r"!\[[^]]*\]\(([^)]+)\)", told)}
