"""The page as a whole: one file that fetches nothing, runs nothing, and can be sent to anybody."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from diloco_tools.monitor.report import sections
from diloco_tools.monitor.report.curves import figures, time_axis
from diloco_tools.monitor.report.drawing.markup import Html, joined, tag, verbatim
from diloco_tools.monitor.report.drawing.wording import (
    clock,
    figure,
    moment,
    plural,
    quantity,
    size,
)
from diloco_tools.monitor.report.facts import OPEN, OVER, STOPPED, Facts
from diloco_tools.monitor.report.sections import panel, toned

ENDINGS = {
    OVER: ("good", "The run is over"),
    STOPPED: ("quiet", "The broker has stopped"),
    OPEN: ("uneasy", "No end is recorded"),
}
PARTS = {
    "plots": "Curves",
    "presence": "Workers over time",
    "workers": "Workers",
    "rounds": "Rounds",
    "lives": "Broker",
    "warnings": "Warnings",
    "orders": "Operators",
    "settings": "Settings",
    "events": "Events",
}


def page_of(facts: Facts) -> str:
    """The report as HTML. Nothing but the style sheet within it is allowed to take effect."""
    style = (files("diloco_tools.monitor.report") / "assets" / "style.css").read_text(
        encoding="utf-8"
    )
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    name = facts.run or "unnamed"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"Run {name}: report"),
        tag("style", verbatim(style)),
    )
    axis = time_axis(facts)
    parts = [
        panel("plots", "Curves", tag("div", *figures(facts, axis), class_="plots")),
        sections.workers_over_time(facts, axis),
        sections.worker_table(facts),
        sections.slow_rounds(facts),
        sections.lives(facts),
        sections.said(facts),
        sections.orders(facts),
        sections.settings(facts),
        sections.events(facts),
    ]
    body = tag("body", _header(facts), _remarks(facts), tag("main", *parts), _footer(facts))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(facts: Facts) -> Html:
    tone, word = ENDINGS[facts.ending]
    badge = tag("div", toned(tone, word), class_="badge", data_tone=tone)
    title = tag("h1", "DiLoCo report ", tag("span", f"run {facts.run or 'unnamed'}"))
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _headline(facts)]
    links = [tag("a", words, href=f"#{name}") for name, words in PARTS.items()]
    return tag(
        "header",
        tag("div", title, badge, class_="bar"),
        tag("dl", *rows, class_="facts"),
        tag("nav", *links, aria_label="Parts of the page"),
    )


def _headline(facts: Facts) -> list[tuple[str, str]]:
    """What a reader in a hurry wants."""
    word = "Pushes" if facts.mode == "async" else "Rounds"
    loss = "—"
    if facts.first_loss is not None:
        loss = f"{figure(facts.first_loss)} → {figure(facts.last_loss)}"
    parameters = facts.model.get("parameters")
    model = f"{quantity(parameters)} parameters" if parameters else "—"
    deaths = sum(worker.deaths for worker in facts.workers)
    many = len(facts.workers) + facts.workers_left_out
    fragments = facts.settings.get("num_fragments")
    mode = facts.mode or "—"
    if isinstance(fragments, int) and fragments > 1:
        mode = f"{mode}, {fragments} fragments"
    return [
        ("Mode", mode),
        ("Model", model),
        ("Began, UTC", moment(facts.began_at, "%d %b %Y %H:%M")),
        ("Lasted", clock(facts.ended_at - facts.began_at)),
        (word, f"{facts.rounds:,}"),
        ("Loss", loss),
        ("Contributions", f"{facts.contributions:,}"),
        ("Workers", f"{many:,}, at most {facts.most_alive:,} at once"),
        ("Deaths", f"{deaths:,}"),
        ("Traffic", f"{size(facts.bytes_up)} up, {size(facts.bytes_down)} down"),
        ("Broker", plural(len(facts.lives), "start")),
    ]


def _remarks(facts: Facts) -> Html:
    """What a reader has to know before the figures."""
    lines = list(facts.remarks)
    if not facts.rounds:
        lines.append("No round has closed in this history, so there are no curves.")
    if facts.ending == OPEN:
        lines.append(
            f"The history ends at {moment(facts.ended_at)} UTC without a last line: the broker was "
            "killed, its machine went down, or it is still running."
        )
    if not lines:
        return verbatim("")
    listed = tag("ul", *(tag("li", line) for line in lines))
    sign = tag("b", tag("span", "◐", aria_hidden="true"), " Note")
    return tag("div", sign, listed, class_="notice", data_tone="uneasy")


def _footer(facts: Facts) -> Html:
    version = facts.lives[-1].version
    parts = [
        f"From {plural(facts.lines, 'line')} of the history, by diloco-report.",
        f"Broker {version}." if version else "",
        "Contributions are whole pushes that count in a version.",
    ]
    return tag("footer", joined(tag("span", part) for part in parts if part), class_="dim")
