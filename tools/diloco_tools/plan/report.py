"""An answer as text in 80 columns, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from diloco_protocol.outer_advice import outer_rate, recommended, small_h
from diloco_protocol.quantities import estimate_s, parameters
from diloco_tools.plan.answer import Answer
from diloco_tools.plan.quantities import of_bits, of_bytes, of_share
from diloco_tools.plan.question import Question
from diloco_tools.plan.search import Found, Option
from diloco_tools.plan.simulated.scene import chunks_of

GOOD = 0.9  # share of time in training below which a search is suggested


def as_text(found: Answer) -> Group:
    """The question in a few lines, and a line for each figure."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(found).items():
        table.add_row(Text(name, "dim"), Text(value))
    return Group(Text("\n".join(_asked(found.question)), "bold"), Text(""), table)


def warnings(found: Answer) -> list[str]:
    """Warnings about the settings as given."""
    q = found.question
    small = small_h(q.sync_every) if q.mode == "sync" else None
    return [] if small is None else [small]


def search_hint(found: Answer) -> str | None:
    """How to search for a setting with more training; None if this one has enough."""
    if found.least_utilisation >= GOOD:
        return None
    return f"Training has less than {GOOD:.0%} of the time. To search for a better setting: --target 95%"


def _asked(question: Question) -> list[str]:
    q = question
    said = [
        f"{parameters(q.parameters)} parameters, {q.workers} workers, {q.mode}, {_setting(q)}, "
        f"steps of {estimate_s(q.step_s)}"
    ]
    delays = ", ".join(estimate_s(each) for each in dict.fromkeys(q.delays))
    lines = dict.fromkeys((q.link(each), q.link_down(each)) for each in range(q.workers))
    links = ", ".join(_line(*each) for each in lines)
    said.append(f"broker at {of_bits(q.broker_link)}, workers at {links}, round trip {delays}")
    if q.sites > 1:
        how = "a relay at each" if q.has_relays else "no relays"
        said.append(f"{q.sites} sites of {q.at_a_site} workers, the broker at the first; {how}")
    if q.has_keys:
        said.append("with keys: all traffic is encrypted")
    if q.cores is not None:
        said.append(f"everything on one machine of {q.cores:g} cores")
    return said


def _line(up: float, down: float) -> str:
    return of_bits(up) if up == down else f"{of_bits(up)} up and {of_bits(down)} down"


def _setting(question: Question) -> str:
    """H, P, tau and the codecs."""
    parts = f"H = {question.sync_every}"
    if question.fragments > 1 or question.delay_steps != 0:
        tau = "auto" if question.delay_steps is None else question.delay_steps
        parts += f", P = {question.fragments}, tau = {tau}"
    return f"{parts}, {question.wire_dtype}/{question.reply_dtype}"


def _rows(found: Answer) -> dict[str, str]:
    q, measured = found.question, found.measured
    per_worker = f"{of_bytes(measured.bytes_up)} up, {of_bytes(measured.bytes_down)} down"
    least = (
        ""
        if found.least_utilisation > found.utilisation - 0.002
        else (f", {of_share(found.least_utilisation)} for the slowest worker")
    )
    rows = {"training has": f"{of_share(found.utilisation)} of the time{least}"}
    what = (
        "a fragment takes"
        if q.fragments > 1
        else "a push takes"
        if q.mode == "async"
        else "a round takes"
    )
    slow = (
        ""
        if measured.slowest_s < 1.02 * measured.exchange_s
        else (f", {estimate_s(measured.slowest_s)} for the slowest worker")
    )
    rows[what] = f"{estimate_s(measured.exchange_s)} from a push to the new parameters{slow}"
    if found.site is not None:
        rows["within a site"] = estimate_s(found.site.exchange_s)
    rows["training waits"] = (
        f"{estimate_s(found.waits_s)} in H steps, which take {estimate_s(found.trains_s)}"
    )
    if q.waits_after or q.mode == "async":
        rows["hidden"] = f"{of_share(found.hidden)} of the exchanges overlaps with training"
    rows["first parameters"] = f"after {estimate_s(measured.start_s)} at all workers"
    each = "a relay, in H steps" if q.has_relays else "a worker, in H steps"
    rows[each] = per_worker
    rows["the broker, in H steps"] = (
        f"{of_bytes(found.bytes_in)} in, {of_bytes(found.bytes_out)} out"
    )
    if q.sites > 1:
        rows["between sites"] = f"{of_bytes(found.bytes_wan)} in H steps, both ways"
    day = found.cycles_a_day
    rows["the broker, a day"] = (
        f"{of_bytes(day * found.bytes_in)} in, {of_bytes(day * found.bytes_out)} out"
    )
    rows["its link"] = f"{of_share(found.line_in)} in, {of_share(found.line_out)} out, on average"
    rows["its CPU"] = (
        f"{estimate_s(measured.broker_cpu_s)} in H steps, {found.broker_cores:.2g} cores on average"
    )
    rows["its memory"] = of_bytes(found.broker_memory)
    failures = found.failures
    if failures is not None:
        waits = (
            ""
            if not failures.others_wait_s
            else (f", {estimate_s(failures.others_wait_s)} for each of the others")
        )
        rows["a failure costs"] = f"{estimate_s(failures.lost_s)} of its worker{waits}"
        rows["with failures"] = (
            f"training has {of_share(failures.utilisation)}, with one per worker every "
            f"{estimate_s(failures.every_s)}"
        )
    if q.mode == "sync":
        rows["outer learning rate"] = recommended(q.workers, q.sync_every)
    rows["simulated"] = _pieces(found)
    return rows


def _pieces(found: Answer) -> str:
    measured, q = found.measured, found.question
    chunks = chunks_of(q.parameters, q.fragments) * q.fragments
    events = f"{measured.events:,} events"
    if measured.pieces >= chunks:
        return f"{events}, {chunks} chunks"
    return f"{events}, {measured.pieces} pieces for {chunks:,} chunks"


def found_as_text(found: Found) -> Group:
    """The settings of a search, mildest first, and its advice."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    names = ("P", "tau", "late by", "codecs", "training has", f"H for {of_share(found.target)}")
    for name in names:
        table.add_column(name, justify="left" if name == "codecs" else "right", header_style="dim")
    for option in found.options:
        question = option.question
        style = "bold green" if option is found.best else ""
        tau = "auto" if question.delay_steps is None else str(question.delay_steps)
        needed = "none" if option.needed is None else f"{option.needed:,}"
        cells = (
            str(question.fragments),
            tau,
            f"{option.late}" if option.late else "",
            f"{question.wire_dtype}/{question.reply_dtype}",
            of_share(option.answer.utilisation),
            needed,
        )
        table.add_row(*(Text(cell, style) for cell in cells))
    return Group(table, Text(""), Text(advice(found)))


def advice(found: Found) -> str:
    """The mildest setting, as a sentence with the options of `diloco-broker serve`."""
    best, steps = found.best, found.steps
    share = of_share(found.target)
    if best is None or steps is None:
        return f"No setting reaches {share} with any H: use a faster link or fewer workers."
    question = best.question
    if best is found.options[0] and steps == question.sync_every:
        return f"The setting as given reaches {share}: no change is needed."
    words = [f"--sync-every {steps}"]
    if question.fragments > 1 or question.delay_steps is None:
        words.append(f"--num-fragments {question.fragments}")
        delay = "auto" if question.delay_steps is None else question.delay_steps
        words.append(f"--fragment-sync-delay {delay}")
    words.append(f"--wire-dtype {question.wire_dtype} --reply-dtype {question.reply_dtype}")
    late = "" if best.late < 1 else f" (replies are merged {best.late} steps after their push)"
    return f"The mildest setting that reaches {share}: {' '.join(words)}{late}."


def as_plain(found: Answer, searched: Found | None = None) -> dict[str, Any]:
    """For JSON: seconds, bytes, shares from 0 to 1; null for parts that were not requested."""
    failures = found.failures
    plain = _plain(found) | {
        "failures": None if failures is None else asdict(failures),
        "outer_lr": outer_rate(found.question.workers) if found.question.mode == "sync" else None,
        "warnings": warnings(found),
        "target": None,
    }
    if searched is not None:
        best = searched.best
        plain["target"] = {
            "utilisation": searched.target,
            "text": advice(searched),
            "best": None if best is None else _option(best) | {"sync_every": searched.steps},
            "options": [_option(each) for each in searched.options],
        }
    return plain


def _plain(found: Answer) -> dict[str, Any]:
    measured = found.measured
    return {
        "question": asdict(found.question),
        "utilisation": found.utilisation,
        "least_utilisation": found.least_utilisation,
        "exchange_s": measured.exchange_s,
        "slowest_exchange_s": measured.slowest_s,
        "site_s": None if found.site is None else found.site.exchange_s,
        "waits_s": found.waits_s,
        "cycle_s": found.cycle_s,
        "hidden": found.hidden,
        "start_s": measured.start_s,
        "bytes_up": measured.bytes_up,
        "bytes_down": measured.bytes_down,
        "broker_bytes_in": found.bytes_in,
        "broker_bytes_out": found.bytes_out,
        "bytes_between_sites": found.bytes_wan,
        "broker_bytes_in_a_day": found.bytes_in * found.cycles_a_day,
        "broker_bytes_out_a_day": found.bytes_out * found.cycles_a_day,
        "broker_line_in": found.line_in,
        "broker_line_out": found.line_out,
        "broker_cpu_s": measured.broker_cpu_s,
        "broker_cores": found.broker_cores,
        "broker_memory_bytes": found.broker_memory,
        "worker_cpu_s": measured.worker_cpu_s,
        "events": measured.events,
        "pieces": measured.pieces,
    }


def _option(option: Option) -> dict[str, Any]:
    question = option.question
    return {
        "num_fragments": question.fragments,
        "fragment_sync_delay": "auto" if question.delay_steps is None else question.delay_steps,
        "wire_dtype": question.wire_dtype,
        "reply_dtype": question.reply_dtype,
        "utilisation": option.answer.utilisation,
        "exchange_s": option.answer.measured.exchange_s,
        "merged_after_steps": option.late,
        "sync_every_for_target": option.needed,
    }
