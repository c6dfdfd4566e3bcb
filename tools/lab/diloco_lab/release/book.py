"""The pages of this repository as one book in HTML: `make docs` makes it in `site/`.

A table of the front page has the chapters and the order of their pages. Sphinx reads the pages in their
places, as CommonMark through MyST; a broken link, also to a heading, ends the build. Links to sources
and folders become plain text.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from diloco_protocol.errors import UsageError
from diloco_tools.terminal import fail

FRONT, SECTION = "README.md", "The book"
PAGE = re.compile(r"\]\(([^)#]+)")  # the target of a link, without an anchor
FOLDER = "docs"
# Former names of pages, without their endings; each has a page that leads to its new name.
MOVED = {
    "CHOOSING": "docs/choosing",
    "CONCEPTS": "docs/concepts",
    "FAILURES": "docs/failures",
    "GLOSSARY": "docs/concepts",
    "broker/ALGORITHMS": "docs/algorithms",
    "broker/CHECKPOINTS": "docs/failures",
    "broker/DESIGN": "CONTRIBUTING",
    "broker/POISON": "SECURITY",
    "broker/README": "docs/broker",
    "broker/RELAYS": "docs/relays",
    "broker/SCHEDULES": "docs/algorithms",
    "broker/STANDBY": "docs/standby",
    "broker/STEERING": "docs/broker",
    "broker/TROUBLE": "docs/failures",
    "protocol/CODECS": "docs/codecs",
    "protocol/DATA": "docs/specification",
    "protocol/KEYS": "docs/specification",
    "protocol/LANES": "docs/specification",
    "protocol/README": "CONTRIBUTING",
    "protocol/SPECIFICATION": "docs/specification",
    "protocol/STANDBY": "docs/specification",
    "tests/README": "CONTRIBUTING",
    "tools/DASHBOARD": "docs/watching",
    "tools/DEMO": "docs/first-run",
    "tools/EXPORTER": "docs/metrics",
    "tools/KUBERNETES": "docs/clusters",
    "tools/PLAN": "docs/performance",
    "tools/RAY": "docs/clusters",
    "tools/README": "docs/watching",
    "tools/REPORT": "docs/watching",
    "tools/SERVICES": "docs/deploying",
    "tools/SLURM": "docs/clusters",
    "tools/TOP": "docs/watching",
    "tools/deploy": "docs/deploying",
    "tools/lab/BENCHMARK": "docs/performance",
    "tools/lab/CHAOS": "docs/faults",
    "tools/lab/EVIDENCE": "docs/evidence",
    "tools/lab/LAN": "docs/performance",
    "tools/lab/SITES": "docs/performance",
    "worker/CHECKPOINTS": "docs/data",
    "worker/DATA": "docs/data",
    "worker/DOCTOR": "docs/launching",
    "worker/FAILURES": "docs/failures",
    "worker/FRAMEWORKS": "docs/frameworks",
    "worker/GROUPS": "docs/frameworks",
    "worker/LAUNCHING": "docs/launching",
    "worker/NAMES": "docs/training-script",
    "worker/README": "docs/training-script",
    "worker/ROUNDS": "docs/training-script",
    "worker/TESTING": "docs/launching",
}
LEADS_TO = """\
<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={0}">
<p>This page has moved: <a href="{0}">{0}</a></p>
"""
# Settings of Sphinx. Text in blocks without a language is no Python, and quotes stay as they were typed.
SETTINGS = {
    "project": "DiLoCo broker",
    "extensions": ["myst_parser"],
    "html_theme": "furo",
    "html_title": "DiLoCo broker",
    "html_css_files": ["book.css"],
    "html_copy_source": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_use_index": False,
    "highlight_language": "text",
    "smartquotes": False,
    "myst_heading_anchors": 4,
    "nitpicky": True,
    "root_doc": "README",
}
STYLE = """\
/* Tables of the pages have long sentences, and names that must not be broken. */
.content { width: 60em; }
.table-wrapper { overflow-x: auto; }
table.docutils td, table.docutils th { vertical-align: top; }
table.docutils td > code, table.docutils td code { overflow-wrap: anywhere; }
table.docutils td:first-child code { white-space: nowrap; overflow-wrap: normal; }
img { max-width: 100%; height: auto; }
@media (max-width: 46em) { table.docutils { font-size: 0.85em; } }
"""
# [text](target) and ![text](target), or code, in which nothing is a link. The text may have `code` too.
LINK = re.compile(
    r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)|^```[\s\S]*?^```|^(?: {4}.*\n)+|`[^`\n]+`",
    re.MULTILINE,
)


def chapters(root: Path) -> dict[str, list[str]]:
    """The pages of each chapter by its title, as the front page has them in a table."""
    front = (root / FRONT).read_text()
    section = front.partition(f"## {SECTION}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    found = {row[1].strip(): list(dict.fromkeys(PAGE.findall(row[2]))) for row in rows[2:]}
    first = next(iter(found), "Start")
    return {first: []} | found | {first: [FRONT, *found.get(first, ())]}


def pages(root: Path) -> list[str]:
    """The pages of the book, in its order.

    Raises:
        UsageError: a page is in no chapter.
    """
    listed = [page for chapter in chapters(root).values() for page in chapter]
    found = {path.name for path in root.glob("*.md")}
    found |= {path.relative_to(root).as_posix() for path in (root / FOLDER).rglob("*.md")}
    if lost := sorted(found - set(listed)):
        raise UsageError(
            f"{', '.join(lost)} would be in no chapter of the book: "
            f"link to it in the table {SECTION!r} of {FRONT}."
        )
    return [page for page in listed if page in found]


def build(root: Path, to: Path) -> None:
    """Make the HTML of all pages in this folder, and replace its contents.

    Raises:
        UsageError: Sphinx is missing, or gave a warning; with its output.
    """
    try:
        sphinx = resolve_name("sphinx.application:Sphinx")
    except ImportError as error:
        raise UsageError(f"Sphinx is not there ({error}). Run: make docs") from None
    there, said = pages(root), io.StringIO()

    def read(_: object, name: str, text: list[str]) -> None:
        text[0] = adapted(root, f"{name}.md", text[0], there)

    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "html")
        settings: dict[str, Any] = SETTINGS | {"include_patterns": there}
        book = sphinx(root, None, made, Path(scratch), "html", settings, status=None, warning=said)
        book.connect("source-read", read)
        book.build()
        if faults := said.getvalue().replace(f"{root}/", "").strip():
            raise UsageError(f"The book has faults:\n{faults}")
        (made / "_static" / "book.css").write_text(STYLE)
        shutil.copyfile(made / "README.html", made / "index.html")
        redirect(made)
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(made, to, ignore=shutil.ignore_patterns(".buildinfo"))


def redirect(made: Path) -> None:
    """Write a page for each former name whose new one is in the book; it leads there."""
    for old, new in MOVED.items():
        if (made / f"{new}.html").exists():
            page = made / f"{old}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(LEADS_TO.format(os.path.relpath(made / f"{new}.html", page.parent)))


def adapted(root: Path, page: str, text: str, there: list[str]) -> str:
    """The text of a page for Sphinx; the front page names the chapters, which are at the side of each.

    `there` are the pages of the book.
    """
    text = LINK.sub(partial(_link, root / page, {root / each for each in there}), text)
    if page != FRONT:
        return text
    for title, chapter in chapters(root).items():
        names = "\n".join(each for each in chapter if each in there and each != page)
        text += f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n"
    return text


def _link(page: Path, there: set[Path], found: re.Match[str]) -> str:
    """A link as it stands, which Sphinx checks; its text where it leads to a source or a folder."""
    picture, text, target = found.groups()
    if target is None or picture or "://" in target:
        return found[0]
    wanted = Path(os.path.normpath(page.parent / target.partition("#")[0]))
    if target.startswith("#") or wanted in there or not wanted.exists():
        return found[0]
    return text if "`" in text or text.rstrip("/") not in target else f"`{text}`"


def main(
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the HTML goes.")] = Path("site"),
) -> None:
    """Make a book of all pages; a link that leads nowhere ends it with 1."""
    try:
        build(Path.cwd(), to)
    except UsageError as error:
        fail("book", str(error), 1)
    typer.echo(f"{to / 'index.html'}")


if __name__ == "__main__":
    typer.run(main)
