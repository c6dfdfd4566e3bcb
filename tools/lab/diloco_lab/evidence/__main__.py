"""`python -m diloco_lab.evidence`: measure the claims of this project, and write the page about them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.records import Results
from diloco_lab.evidence import page, picture
from diloco_lab.evidence.conduct import Conducted, Study, key_of
from diloco_lab.evidence.parts import PARTS
from diloco_protocol.clients.command_line import with_version

COMMAND = "python -m diloco_lab.evidence"
ALL, PAGE = "all", "page"
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@with_version
def main(  # noqa: PLR0917  each is an option
    parts: Annotated[
        list[str],
        typer.Argument(
            help=f"Which parts: {', '.join(PARTS)}; or {ALL}. {PAGE}: only write the page, from what is "
            "in the file of results.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = Path(
        "runs/evidence"
    ),
    page_file: Annotated[
        Path | None,
        typer.Option("--page", help="The page's file; default: EVIDENCE.md in that folder."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, paired by seed.")] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            min=100,
            help="Inner steps of each worker instead of each part's own.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or folder to train on; default: Python's standard library."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one for each core.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one JSON object, and no progress.")
    ] = False,
) -> None:
    """Train small models, hold what comes out against each claim: PASS, or NOT SHOWN.

    Each run is kept as soon as it is done, in results.jsonl of the folder; the same command goes on
    where it was stopped. Up to ten minutes for each part on two cores.
    """
    experiment = Experiment(
        COMMAND, out, interrupted="the same command goes on with what is missing", is_quiet=True
    )
    wrong = experiment.refuse
    wanted = list(PARTS) if ALL in parts or parts == [PAGE] else list(dict.fromkeys(parts))
    for name in wanted:
        if name not in PARTS:
            wrong(f"there is no part {name!r}; choose from {', '.join(PARTS)}, {ALL} or {PAGE}")
    if data is not None and not data.exists():
        wrong(f"{data} does not exist; --data takes a text file or a folder of them")
    if steps is not None and steps % 100:
        wrong(f"--steps is {steps} but must be a multiple of 100, so that each H divides it")
    with experiment.folder():
        try:
            results = Results(out / "results.jsonl", key_of)
        except ValueError as error:
            wrong(f"{out / 'results.jsonl'} is not a file of results ({error}); name another --out")
        chosen = None if data is None else str(data.resolve())
        study = Study(results, seeds=seeds, data=chosen, steps=steps)
        for name in wanted:
            if parts != [PAGE]:
                measure(study, name, jobs, quiet=as_json)
    found = [study.conducted(part) for part in PARTS.values() if not study.missing(part)]
    if not found:
        wrong(f"{results.file} has not all runs of any part; measure one first")
    write(found, out, page_file or out / "EVIDENCE.md", quiet=as_json)


def measure(study: Study, name: str, jobs: int, *, quiet: bool) -> None:
    """One part, with a line for each run as it is done, and its findings at the end."""
    part = PARTS[name]
    began = time.monotonic()

    def tell(text: str) -> None:
        if not quiet:
            typer.echo(f"{name} {text}", err=True)

    if missing := study.missing(part):
        tell(f"{missing} runs to go")
    conducted = study.conduct(part, jobs, tell)
    if not quiet:
        typer.echo(f"\n{part.title} ({time.monotonic() - began:.0f} s)")
        for finding in conducted.findings:
            expected = str(finding.claim.relation)
            told = f"  {finding.verdict:<10} {finding.claim.text}: {finding.told}"
            typer.echo(told + (f"; expected {expected}" if expected else ""))


def write(found: Sequence[Conducted], out: Path, page_file: Path, *, quiet: bool) -> None:
    """The findings of all parts that are whole, as JSON, as a page and in pictures."""
    plain = json.dumps(page.plain(found), indent=1, allow_nan=False)
    (out / "findings.json").write_text(plain + "\n")
    written = ["results.jsonl", "findings.json"]
    folder = os.path.relpath(out, page_file.parent)
    page_file.write_text(page.markdown(found, "" if folder == "." else f"{folder}/"))
    try:
        written += [picture.draw(each, out).name for each in found]
    except ImportError:
        if not quiet:
            missing = "no pictures: matplotlib is missing (pip install 'diloco-broker[plot]')"
            typer.echo(missing, err=True)
    if quiet:
        typer.echo(plain)
    else:
        typer.echo(f"\n{', '.join(written)} are in {out}; the page is {page_file}")


if __name__ == "__main__":
    app(prog_name=COMMAND)
