"""EVIDENCE.md and findings.json: what was claimed, what was measured, and what that shows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_lab.evidence.claim import DIVERGED, Finding, Result, perplexity
from diloco_lab.evidence.conduct import TUNING_SEED, Conducted, Tuned
from diloco_lab.evidence.trial import MODELS, Trial, parameters

HEAD = """# Evidence

What this project claims of training with DiLoCo, measured with its own broker and workers. `make
evidence` measures all of it, `python -m diloco_lab.evidence PART` one part. This page is written by
that program from `tools/lab/evidence/results.jsonl`, a line for each run:

    python -m diloco_lab.evidence page --out tools/lab/evidence --page tools/lab/EVIDENCE.md

**How to read it.** The models are byte-level GPTs of {sizes} parameters, trained on the source of
Python's standard library (or on what `--data` names) with {seeds} paired seeds. *Perplexity* is exp of
the loss per byte on held-out text, of the global parameters. A figure is a difference in percent: its
mean over the seeds, the standard error of that, and each seed. **PASS**: the mean keeps to what was
expected, also one standard error nearer to the bound. With three seeds one in five such claims would
pass by luck where the truth lies on the bound. **NOT SHOWN**: it does not, for whatever reason; it
stays in the table. *Reported*: nothing was expected.

**What was tuned.** Where an arm was tuned it has the best of the settings shown (outer learning rate /
momentum, or the inner learning rate), found on a seed ({tuning}) that nothing is measured on, but with
the same held-out text. The best at an end of what was tried may have better ones beyond it. The outer
momentum is constant but for the part about schedules, though the broker's default warms it up. Where
nothing was tuned, the part says so.

**How it is run.** A broker and its workers live in one process and take turns to compute. They are the
real ones, over TCP, and a test holds that rounds have the same bits as those of separate processes
(`test_run_has_the_bits_of_separate_processes`); others hold rounds, asynchronous mode, Dynamic Local
Updates and losses against plain torch. Where workers have different speeds, time is virtual: a worker
of v steps a second has made H of them after H / v seconds, and communication takes none. {versions}

**What it is not.** Models of this size, trained for a thousand steps, show relations that can be
repeated on a laptop. They do not show what DiLoCo does at scale; the papers do. "Published" names their
figures, which are of perplexities per token: a token of four bytes makes 3% of 12%, so the same bound
is a laxer one here.
"""


def plain(found: Sequence[Conducted]) -> dict[str, Any]:
    """For programs: parts by name, with claims, arms and tuning."""
    return {each.part.name: _plain_part(each) for each in found}


def _plain_part(of: Conducted) -> dict[str, Any]:
    return {
        "title": of.part.title,
        "claims": [_plain_finding(each) for each in of.findings],
        "arms": {
            name: {
                "trial": of_seed[0]["trial"],
                "losses": [each["loss"] for each in of_seed],
                "bytes_up": [each["bytes_up"] for each in of_seed],
                "bytes_down": [each["bytes_down"] for each in of_seed],
            }
            for name, of_seed in of.measured.items()
        },
        "tuning": {
            name: [
                {"changes": dict(each.changes), "loss": each.loss, "is_best": each.is_best}
                for each in choices
            ]
            for name, choices in of.tuned.items()
        },
    }


def _plain_finding(finding: Finding) -> dict[str, Any]:
    relation = finding.claim.relation
    return {
        "claim": finding.claim.text,
        "least_percent": _finite(relation.least),
        "most_percent": _finite(relation.most),
        "values_percent": [_finite(value) for value in finding.values],  # null: diverged
        "mean_percent": _finite(finding.mean),
        "error_percent": _finite(finding.error),
        "verdict": finding.verdict,
        "published": finding.claim.published,
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def markdown(found: Sequence[Conducted], pictures: str = "") -> str:
    """The whole page. `pictures` is the folder of NAME.png, as seen from the page, with a slash."""
    trials = [Trial.from_plain(r["trial"]) for each in found for r in _results(each)]
    used = [name for name in MODELS if any(trial.model == name for trial in trials)]
    sizes = " and ".join(f"{sum(parameters(name)) / 1e6:.2f}M" for name in used)
    seeds = len({trial.seed for trial in trials})
    lines = [
        HEAD.format(sizes=sizes or "no", seeds=seeds, tuning=TUNING_SEED, versions=_versions(found))
    ]
    verdicts = [finding.verdict for each in found for finding in each.findings]
    lines.append(
        f"**{verdicts.count('PASS')} PASS, {verdicts.count('NOT SHOWN')} NOT SHOWN**, "
        f"{verdicts.count('reported')} reported.\n"
    )
    for each in found:
        lines += _part(each, pictures)
    return "\n".join(lines).rstrip() + "\n"


def _versions(found: Sequence[Conducted]) -> str:
    """A sentence about what the runs were made with; more than one where they differ."""
    used = {json.dumps(r["versions"], sort_keys=True) for each in found for r in _results(each)}
    each = (json.loads(line) for line in sorted(used))
    told = (f"torch {versions['torch']}, Python {versions['python']}" for versions in each)
    return f"With {' and with '.join(told)}."


def _results(of: Conducted) -> Iterator[Result]:
    for of_seed in of.measured.values():
        yield from of_seed


def _part(of: Conducted, pictures: str) -> Iterator[str]:
    part = of.part
    minutes = sum(each["seconds"] for each in _results(of)) / 60
    yield f"## {part.title}\n"
    told = f"`python -m diloco_lab.evidence {part.name}`, {minutes:.0f} minutes of a core, tuning apart"
    yield f"{part.about} ({told}.)\n"
    yield "| claim | expected | measured (each seed) | | published |"
    yield "| --- | --- | --- | --- | --- |"
    for finding in of.findings:
        verdict = finding.verdict if finding.verdict == "reported" else f"**{finding.verdict}**"
        claim, relation = finding.claim, str(finding.claim.relation)
        yield f"| {claim.text} | {relation} | {finding.told} | {verdict} | {claim.published} |"
    yield ""
    yield f"![{part.title}]({pictures}{part.name}.png)\n"
    yield "| arm | final loss, nats per byte (each seed) | perplexity |" + (
        " tuned: loss on the seed of the tuning |" if of.tuned else ""
    )
    yield "| --- " * (4 if of.tuned else 3) + "|"
    for name, of_seed in of.measured.items():
        losses = [each["loss"] for each in of_seed]
        each = ", ".join("diverged" if loss is None else f"{loss:.4f}" for loss in losses)
        values = [perplexity(result) for result in of_seed]
        mean = "diverged" if DIVERGED in values else f"{statistics.fmean(values):.3f}"
        row = f"| {name} | {each} | {mean} |"
        if of.tuned:
            row += f" {_choices(of.tuned.get(name, []))} |"
        yield row
    yield ""


def _choices(tuned: Sequence[Tuned]) -> str:
    return ", ".join(_choice(each) for each in tuned)


def _choice(tuned: Tuned) -> str:
    loss = "diverged" if tuned.loss is None else f"{tuned.loss:.3f}"
    text = f"{_settings(tuned.changes)}: {loss}"
    return f"**{text}**" if tuned.is_best else text


def _settings(changes: Mapping[str, Any]) -> str:
    """As eta / mu, or the inner learning rate.

    >>> _settings({"outer_lr": 0.7, "outer_momentum": 0.9})
    '0.7 / 0.9'
    """
    return " / ".join(f"{value:g}" for value in changes.values())
