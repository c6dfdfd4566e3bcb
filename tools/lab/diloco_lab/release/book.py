"""The pages of this repository as one book in HTML: `make docs` makes it in `site/`.

Sphinx reads the pages where they are, as CommonMark by way of MyST, as forges do; a link that leads
nowhere, also to a heading, ends the build. Links to what is no page of the book (sources, folders)
become plain text.
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

# In the order in which they are read. A page that is not there yet has its place all the same.
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "CONCEPTS.md", "GLOSSARY.md"),
    "Choosing": ("CHOOSING.md", "broker/ALGORITHMS.md", "broker/SCHEDULES.md"),
    "The training script": (
        "worker/README.md",
        "worker/ROUNDS.md",
        "worker/FRAMEWORKS.md",
        "worker/GROUPS.md",
        "worker/DATA.md",
        "worker/CHECKPOINTS.md",
        "worker/LAUNCHING.md",
        "worker/DOCTOR.md",
        "worker/TESTING.md",
        "worker/NAMES.md",
    ),
    "Sizing and placing": (
        "tools/deploy.md",
        "tools/PLAN.md",
        "tools/SLURM.md",
        "tools/RAY.md",
        "tools/KUBERNETES.md",
        "tools/SERVICES.md",
    ),
    "Operating": (
        "broker/README.md",
        "broker/STEERING.md",
        "broker/RELAYS.md",
        "broker/STANDBY.md",
        "tools/README.md",
        "tools/TOP.md",
        "tools/DASHBOARD.md",
        "tools/EXPORTER.md",
        "tools/REPORT.md",
    ),
    "When something breaks": (
        "FAILURES.md",
        "worker/FAILURES.md",
        "broker/CHECKPOINTS.md",
        "broker/TROUBLE.md",
    ),
    "Security": ("SECURITY.md", "broker/POISON.md"),
    "The protocol": (
        "protocol/README.md",
        "protocol/SPECIFICATION.md",
        "protocol/CODECS.md",
        "protocol/KEYS.md",
        "protocol/LANES.md",
        "protocol/DATA.md",
        "protocol/RELAYS.md",
        "protocol/STANDBY.md",
    ),
    "What was measured": (
        "tools/lab/EVIDENCE.md",
        "tools/DEMO.md",
        "tools/lab/LAN.md",
        "tools/lab/SITES.md",
        "tools/lab/BENCHMARK.md",
        "tools/lab/CHAOS.md",
    ),
    "Changing it": ("CONTRIBUTING.md", "broker/DESIGN.md", "tests/README.md", "CHANGELOG.md"),
}
FOLDERS = ("broker", "protocol", "tests", "tools", "worker")
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


def pages(root: Path) -> list[str]:
    """The pages of the book that are there, in its order.

    Raises:
        UsageError: a page is in no chapter.
    """
    listed = [page for chapter in CHAPTERS.values() for page in chapter]
    found = {path.name for path in root.glob("*.md")}
    for folder in FOLDERS:
        found |= {path.relative_to(root).as_posix() for path in (root / folder).rglob("*.md")}
    if lost := sorted(found - set(listed)):
        raise UsageError(
            f"{', '.join(lost)} would be in no chapter of the book: "
            f"name it in CHAPTERS of {Path(__file__).name}."
        )
    return [page for page in listed if page in found]


def build(root: Path, to: Path) -> None:
    """Make the HTML of all pages in this folder; what was there is replaced.

    Raises:
        UsageError: Sphinx is not there, or warns of something; with what it said.
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
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(made, to, ignore=shutil.ignore_patterns(".buildinfo"))


def adapted(root: Path, page: str, text: str, there: list[str]) -> str:
    """The text of a page for Sphinx; the front page names the chapters, which are at the side of each.

    `there` are the pages of the book.
    """
    text = LINK.sub(partial(_link, root / page, {root / each for each in there}), text)
    if page != "README.md":
        return text
    for title, chapter in CHAPTERS.items():
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
