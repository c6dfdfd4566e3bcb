"""The pages as a book: all of them are in it, in one order, and nothing in it leads nowhere."""

from __future__ import annotations

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
    """A small repository with these pages; `tools__TOP` is tools/TOP.md."""
    for name, text in pages.items():
        path = root / (name.replace("__", "/") + ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def gathered(root: Path, page: str) -> str:
    book.gather(root, root / "out")
    return (root / "out" / page).read_text()


def test_every_page_is_in_a_chapter_once() -> None:
    listed = [page for chapter in book.CHAPTERS.values() for page in chapter]
    assert len(listed) == len(set(listed))
    assert set(book.pages(ROOT)) <= set(listed)


def test_front_page_lists_the_pages_in_the_order_of_the_book() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("## The book")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]  # two are the head
    pages = re.compile(r"\]\(([^)#]+)")  # without anchors
    linked = list(dict.fromkeys(page for row in rows for page in pages.findall(row)))
    order = [page for chapter in book.CHAPTERS.values() for page in chapter if page in linked]
    assert linked == order
    for (title, chapter), row in zip(book.CHAPTERS.items(), rows[2:], strict=True):
        assert row.startswith(f"| {title} | ")
        assert set(pages.findall(row)) <= set(chapter)


def test_page_that_is_in_no_chapter_is_named(tmp_path: Path) -> None:
    write(tmp_path, README="# One", tools__NEW="# New")
    with pytest.raises(UsageError, match=r"tools/NEW.md would be in no chapter"):
        book.pages(tmp_path)


def test_page_that_is_not_there_yet_leaves_no_hole(tmp_path: Path) -> None:
    write(tmp_path, README="# One", tools__TOP="# Two")
    assert book.pages(tmp_path) == ["README.md", "tools/TOP.md"]


def test_links_hold_where_readmes_are_the_first_pages_of_their_folders(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="# One",
        tools__README="# Two",
        tools__TOP="[a](README.md#b) [c](../README.md)",
    )
    assert gathered(tmp_path, "tools/TOP.md") == "[a](index.md#b) [c](../index.md)"


def test_links_to_what_is_no_page_are_text(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "tools").mkdir()
    write(
        tmp_path,
        README="[x.py](x.py), [tools/](tools), [`run`](x.py), [the code](x.py) and `[no](link.md)`\n",
    )
    text = gathered(tmp_path, "index.md")
    assert text.startswith("`x.py`, `tools/`, `run`, the code and `[no](link.md)`\n")


def test_code_is_left_alone(tmp_path: Path) -> None:
    text = "```text\n[a](b.md)\n```\n\n    [a](b.md)\n"
    assert gathered(write(tmp_path, README=text), "index.md").startswith(text)


def test_link_to_what_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, README="[a](b.md)")
    with pytest.raises(UsageError, match=r"README.md links to b.md, which is not there."):
        book.gather(tmp_path, tmp_path / "out")


@SPHINX
def test_link_to_a_heading_that_is_not_there_ends_the_build(tmp_path: Path) -> None:
    write(
        tmp_path, README="# One\n\n[a](SECURITY.md#keys) [b](SECURITY.md#locks)", SECURITY="# Keys"
    )
    with pytest.raises(UsageError) as error:
        book.build(tmp_path, tmp_path / "site")
    (fault,) = str(error.value).splitlines()[1:]
    assert fault.startswith("index.md:3: WARNING") and "locks" in fault
    assert not (tmp_path / "site").exists()


@SPHINX
def test_all_pages_make_a_book_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco_lab.release.book", "--to", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    made = {path.relative_to(tmp_path / "site") for path in tmp_path.rglob("*.html")}
    wanted = {Path(book.place(page)).with_suffix(".html") for page in book.pages(ROOT)}
    assert wanted <= made
    for path in made:
        text = (tmp_path / "site" / path).read_text()
        # It can be read without a network, and from a disk.
        assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', text), path
    shown = {path.name for path in (tmp_path / "site" / "_images").iterdir()}
    told = "".join((ROOT / page).read_text() for page in book.pages(ROOT))
    assert shown == {Path(each).name for each in re.findall(r"!\[[^]]*\]\(([^)]+)\)", told)}
