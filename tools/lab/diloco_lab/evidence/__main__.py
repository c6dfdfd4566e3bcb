"""`python -m diloco_lab.evidence`: measure the claims of this project, and write the page about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.records import BadFile, Results
from diloco_lab.driver.tables import write_page
from diloco_lab.evidence import page
from diloco_lab.evidence.claim import Part
from diloco_lab.evidence.conduct import Study, key_of
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
        typer.Option("--page", help="Put the tables into this page, too."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, paired by seed.")] = 3,
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or folder to train on; default: Python's standard library."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one for each core.")] = 0,
) -> None:
    """Train small models and compare the results with each claim: PASS, or NOT SHOWN.

    The result of each run is added to results.jsonl of the folder as soon as it is known; the same
    command continues after an interruption. Up to ten minutes for each part on two cores.
    """
    experiment = Experiment(
        COMMAND, out, interrupted="the same command continues with the missing runs"
    )
    wrong = experiment.refuse
    wanted = list(PARTS) if ALL in parts or parts == [PAGE] else list(dict.fromkeys(parts))
    for name in wanted:
        if name not in PARTS:
            wrong(f"unknown part {name!r}; choose from {', '.join(PARTS)}, {ALL} or {PAGE}")
    if data is not None and not data.exists():
        wrong(f"{data} does not exist; --data takes a text file or a folder of them")
    with experiment.folder():
        try:
            results = Results(out / "results.jsonl", key_of)
        except ValueError as error:
            wrong(f"{out / 'results.jsonl'} is not a file of results ({error}); name another --out")
        chosen = None if data is None else str(data.resolve())
        study = Study(results, seeds=seeds, data=chosen)
        for name in wanted:
            if parts != [PAGE]:
                measure(experiment, study, PARTS[name], jobs)
    found = [study.conducted(part) for part in PARTS.values() if not study.missing(part)]
    if not found:
        wrong(f"{results.file} has not all runs of any part; measure one first")
    if page_file is not None:
        try:
            write_page(page_file, page.blocks(PARTS, found))
        except BadFile as error:
            wrong(str(error))
    try:
        for each in filter(page.has_curves, found):
            page.draw(each, out)
    except ImportError:
        experiment.say("no pictures: matplotlib is missing (pip install 'diloco-broker[plot]')")
    experiment.say(f"results and pictures are in {out}")


def measure(experiment: Experiment, study: Study, part: Part, jobs: int) -> None:
    """Measure one part, with a line for each completed run, and its findings at the end."""
    if missing := study.missing(part):
        experiment.tick(f"{part.name} {missing} runs to go")
    conducted = study.conduct(part, jobs, lambda text: experiment.tick(f"{part.name} {text}"))
    experiment.tick(part.title)
    for finding in conducted.findings:
        expected = str(finding.claim.relation)
        told = f"  {finding.verdict:<10} {finding.claim.text}: {finding.told}"
        experiment.say(told + (f"; expected {expected}" if expected else ""))


if __name__ == "__main__":
    app(prog_name=COMMAND)
