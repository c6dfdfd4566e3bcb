"""The pages of this repository as one book in HTML: `make docs` makes it in `site/`.

The pages stay where they are, so links between them work on a forge. Here they are copied to one
folder, in which READMEs are called `index.md`, and links to what is no page of the book (sources,
folders) become plain text. Sphinx makes HTML of that. It reads CommonMark by way of MyST, as forges
do; a link that leads nowhere, also to a heading, ends the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

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
PICTURES = (".png", ".svg")
# Settings of Sphinx. Text in blocks without a language is no Python, and quotes stay as they were typed.
SETTINGS = {
    "project": "DiLoCo broker",
    "extensions": ["myst_parser"],
    "html_theme": "furo",
    "html_title": "DiLoCo broker",
    "html_static_path": ["_static"],
    "html_css_files": ["book.css"],
    "html_copy_source": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_use_index": False,
    "highlight_language": "text",
    "smartquotes": False,
    "myst_heading_anchors": 4,
    "root_doc": "index",
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


def gather(root: Path, to: Path) -> None:
    """Copy all pages there, with links that hold in the book, and the pictures that they show.

    Raises:
        UsageError: a page is in no chapter, or links to what is not there.
    """
    there = pages(root)
    for page in there:
        target = to / place(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (root / page).read_text()
        text = LINK.sub(partial(_link, root, page, there), text)
        target.write_text(text + (_contents(there) if page == "README.md" else ""))
        for name in _pictures(root / page):
            copy = to / os.path.relpath((root / page).parent / name, root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile((root / page).parent / name, copy)


def place(page: str) -> str:
    """Where a page is in the book: a README is the first page of its folder."""
    return re.sub(r"(^|/)README\.md$", r"\1index.md", page)


def build(root: Path, to: Path) -> None:
    """Make the HTML of all pages in this folder; what was there is replaced.

    Raises:
        UsageError: Sphinx is not there, or warns of something; with what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch, "pages"), Path(scratch, "html")
        gather(root, source)
        (source / "_static").mkdir()
        (source / "_static" / "book.css").write_text(STYLE)
        settings = "".join(f"{name} = {value!r}\n" for name, value in SETTINGS.items())
        (source / "conf.py").write_text(settings)
        # Warnings are errors, and all of them are shown.
        words = [
            "-q",
            "--no-color",
            "-W",
            "--keep-going",
            "-n",
            "-b",
            "html",
            "-d",
            f"{scratch}/doctrees",
        ]
        command = [sys.executable, "-m", "sphinx", *words, str(source), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        said = done.stderr.replace(f"{source}/", "").strip()
        if "No module named" in said:
            raise UsageError(f"Sphinx and what it needs are not there ({said}). Run: make docs")
        if done.returncode:
            raise UsageError(f"The book has faults:\n{said}")
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(made, to, ignore=shutil.ignore_patterns(".buildinfo"))


def _link(root: Path, page: str, there: list[str], found: re.Match[str]) -> str:
    picture, text, target = found.groups()
    if target is None:
        return found[0]
    path, hash_, heading = target.partition("#")
    if "://" in target or not path:
        return found[0]
    wanted = os.path.relpath(root / Path(page).parent / path, root)
    if not (root / wanted).exists():
        raise UsageError(f"{page} links to {target}, which is not there.")
    if wanted in there:
        relative = os.path.relpath(place(wanted), Path(place(page)).parent)
        return f"[{text}]({relative}{hash_}{heading})"
    if picture:
        return found[0]
    return text if "`" in text or text.rstrip("/") not in target else f"`{text}`"


def _pictures(page: Path) -> list[str]:
    links = (found[3] for found in LINK.finditer(page.read_text()) if found[1])
    return [name for name in links if name.endswith(PICTURES) and "://" not in name]


def _contents(there: list[str]) -> str:
    """The chapters as Sphinx is told of them, behind the front page; shown at the side of each page."""
    made = []
    for title, chapter in CHAPTERS.items():
        names = [place(page).removesuffix(".md") for page in chapter if page in there]
        names = [name for name in names if name != "index"]
        lines = [":hidden:", f":caption: {title}", "", *names]
        made.append("```{toctree}\n" + "\n".join(lines) + "\n```\n")
    return "\n\n" + "\n".join(made)


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
