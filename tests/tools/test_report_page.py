"""The page of diloco-report: refers to nothing, runs nothing, shows every text as it is."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_tools.monitor.report.curves import time_axis
from diloco_tools.monitor.report.drawing.axes import NumberAxis, TimeAxis, scale_of, ticks
from diloco_tools.monitor.report.drawing.charts import Plot, line_chart
from diloco_tools.monitor.report.drawing.markup import Html, tag
from diloco_tools.monitor.report.facts import Curve
from diloco_tools.monitor.report.history.reading import read_run
from diloco_tools.monitor.report.page import PARTS
from diloco_tools.monitor.report.thinning import Point
from kit.past_runs import closed, event, line, start, write_run
from kit.report_pages import Page, action, facts_of, page

AT = 1_700_000_000.0
# On a machine that is busy an example may take seconds.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</title><script>alert(1)</script>",
    "\"' onmouseover='alert(1)",
    "</style><svg/onload=alert(1)>",
    "&lt;b&gt; &amp; [red]x",
    "javascript:alert(1)",
]


def hostile_run(folder: Path, text: str) -> Page:
    """A run in which all that somebody else has chosen is this text."""
    told = {"run": text, "version": text, "mode": text}
    lines: list[Any] = [
        start(AT, **told, settings={"outer": {"lr": text}, text: text}),
        event(AT + 1, f"{text} joins from {text}."),
        event(AT + 2, text, level=text),
        event(AT + 3, text, level="error"),
        closed(AT + 9, 0, text, "b"),
        event(
            AT + 9, f"Round 0 closed in 9.0 s: 1 of 2 expected workers averaged, without {text}."
        ),
        start(AT + 10, **told, settings={"outer": {"lr": f"{text}!"}, text: text}),
        line("stop", AT + 11, text=text),
    ]
    return page(
        facts_of(folder, *lines, actions=(action(AT + 5, text, text, who=text, before=text),))
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_what_strangers_say_is_text_wherever_it_stands(tmp_path: Path, text: str) -> None:
    shown, plain = hostile_run(tmp_path, text), hostile_run(tmp_path, "stranger")
    assert shown.tags == plain.tags, "no text makes an element, or ends one"
    assert [each[:2] for each in shown.attributes] == [each[:2] for each in plain.attributes]
    words = " ".join(text.split())
    for section in ("head", "presence", "workers", "warnings", "orders", "settings", "events"):
        assert words in shown.text(section), section
    assert any(f"{text}: here for" in each for each in shown.titles)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_page_refers_to_nothing_and_runs_nothing(tmp_path: Path, mode: str) -> None:
    rounds = [closed(AT + n, n, "a", "b", fragment=n % 3, staleness=n % 2) for n in range(40)]
    shown = page(facts_of(tmp_path, start(AT, mode=mode), *rounds))
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(shown.tags)
    for tag_, name, value in shown.attributes:
        assert name not in ("src", "style", "srcset", "action") and not name.startswith("on")
        assert not name.endswith("href") or value.startswith("#"), f"{tag_} refers to {value}"
        assert "url(" not in value
    assert "://" not in shown.markup and "@import" not in shown.style and "url(" not in shown.style
    targets = {value for _, name, value in shown.attributes if name == "id"}
    links = {value[1:] for tag_, name, value in shown.attributes if (tag_, name) == ("a", "href")}
    assert links == set(PARTS) and links <= targets


def test_nothing_but_its_own_style_may_take_effect(tmp_path: Path) -> None:
    shown = page(read_run(write_run(tmp_path, 3)))
    (policy,) = (v for t, n, v in shown.attributes if (t, n) == ("meta", "content") and "src" in v)
    digest = b64encode(sha256(shown.style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in policy


def test_page_says_what_the_facts_say(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        start(AT),
        event(AT + 1, "a joins from h."),
        closed(AT + 10, 0, "a", "b", loss=3.25),
        event(AT + 10, "Round 0 closed in 9.0 s: 2 of 3 expected workers averaged, without c."),
        event(AT + 12, "b counts as dead: nothing was heard from it for 30 s.", level="warning"),
        closed(AT + 50, 1, "a", loss=2.75),
        line("stop", AT + 60, text="anna asked for it", run_is_over=True),
        actions=(action(AT + 55, "shutdown", "the run is over, the broker stops"),),
    )
    shown = page(facts)
    head = shown.text("head")
    for words in ("The run is over", "3.250 → 2.750", "run 3fa2c1d09b11", "Lasted 00:01:00"):
        assert words in head
    assert "Deaths 1" in head and "2, at most 2 at once" in head
    assert "counted as dead" in shown.text("workers") and "2 of 2" in shown.text("workers")
    assert "2 of 3" in shown.text("rounds") and " c" in shown.text("rounds")
    assert "the run is over: anna asked for it" in shown.text("lives")
    assert "warning b counts as dead" in shown.text("warnings")
    assert "the run is over, the broker stops anna 3" in shown.text("orders")
    assert "Steps to a boundary (H) 500" in shown.text("settings")
    assert "last 2.750 · from 2.750 (round 1) to 3.250 (round 0)" in shown.text("plots")


def test_each_column_of_a_chart_tells_its_values(tmp_path: Path) -> None:
    shown = page(facts_of(tmp_path, *(closed(AT + n, n, "a", loss=9.0 - n) for n in range(5))))
    (told,) = (each for each in shown.titles if "5.000" in each)
    assert told == "round 4, 14 Nov 2023 22:13:24 UTC\n5.000"


# Charts.


def drawn(curves: list[Curve], axis: NumberAxis | TimeAxis, **options: Any) -> Page:
    return Page(line_chart(Plot("Loss", "", **options), curves, lambda _: axis))


def a_curve(*values: float, name: str = "", absent: tuple[tuple[float, float], ...] = ()) -> Curve:
    made = tuple(Point(AT + n, n, value) for n, value in enumerate(values))
    return Curve(name, made, len(made), absent)


def test_line_is_drawn_from_corner_to_corner() -> None:
    curve = a_curve(0.0, 5.0, 10.0)
    (path,) = drawn([curve], NumberAxis(curve.points, "round")).paths("curve")
    xs, ys = zip(*re.findall(r"[ML](-?\d+) (-?\d+)", path), strict=True)
    assert xs == ("0", "500", "1000")
    assert int(ys[0]) == 1000 > int(ys[1]) > int(ys[2]) > 0


def test_point_alone_is_a_dot() -> None:
    curve = a_curve(3.0)
    (path,) = drawn([curve], NumberAxis(curve.points, "round")).paths("curve")
    assert re.fullmatch(r"M500 \d+h0", path)


def test_no_line_is_drawn_where_there_was_no_broker_or_no_worker() -> None:
    curve = a_curve(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    away = TimeAxis(AT, AT + 5, [(AT + 2.1, AT + 2.9)])
    assert drawn([curve], away).paths("curve")[0].count("M") == 2
    assert len([x for x in drawn([curve], away).attributes if x[1:] == ("class", "away")]) == 1
    gone = a_curve(
        1.0, 2.0, 3.0, 4.0, 5.0, 6.0, absent=((AT + 0.2, AT + 0.8), (AT + 3.5, AT + 4.0))
    )
    assert drawn([gone], TimeAxis(AT, AT + 5, [])).paths("curve")[0].count("M") == 3


def test_line_begins_anew_where_rounds_are_repeated() -> None:
    numbers = [0, 1, 2, 3, 2, 3, 4]
    points = tuple(Point(AT + n, number, 1.0) for n, number in enumerate(numbers))
    curve = Curve("", points, 7)
    assert drawn([curve], NumberAxis(points, "round")).paths("curve")[0].count("M") == 2


def test_value_that_would_flatten_all_others_is_told_instead() -> None:
    curve = a_curve(5000.0, *(2.0 + n % 7 / 10 for n in range(60)))
    shown = drawn([curve], NumberAxis(curve.points, "round"))
    assert "1 value (5.00e+03) is off the scale." in shown.text()
    assert "to 5.00e+03 (round 0)" in shown.text()


def test_round_that_a_pause_interrupted_does_not_flatten_the_others(tmp_path: Path) -> None:
    took = [2.0 + n % 5 / 10 for n in range(40)]
    took[35] = 36_000.0
    lines = [closed(AT + 40_000 * n, n, "a", seconds=s) for n, s in enumerate(took, start=0)]
    shown = page(facts_of(tmp_path, start(AT), *lines))
    assert "1 value (10 h) is off the scale." in shown.text()


def test_many_lines_have_colours_for_eight_and_say_how_many_more() -> None:
    curves = [a_curve(1.0, float(n), name=f"w{n}") for n in range(20)]
    shown = drawn(curves, NumberAxis(curves[0].points, "round"))
    assert len(shown.paths("curve")) == 20 and len(shown.paths("rest")) == 12
    assert "and 12 more in grey" in shown.text()


@UNHURRIED
@given(
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=30),
    st.booleans(),
)
def test_scale_has_room_for_the_newer_values(values: list[float], from_zero: bool) -> None:
    scale = scale_of(values, from_zero=from_zero)
    assert scale.low < scale.high
    assert 0 <= scale.place(values[-1]) <= 1
    assert not from_zero or scale.low <= 0
    assert 1 <= len(ticks(scale.low, scale.high, 5)) <= 12


@UNHURRIED
@given(
    st.lists(st.floats(0, 1e9), min_size=2, max_size=20), st.lists(st.floats(0, 1e9), max_size=9)
)
def test_time_goes_on_along_the_axis_whatever_it_leaves_short(
    ends: list[float], asked: list[float]
) -> None:
    times = sorted(AT + each for each in ends)
    away = list(zip(times[1:-1:2], times[2:-1:2], strict=False))
    axis = TimeAxis(times[0], times[-1], away)
    places = [axis.at(at) for at in sorted([*times, *(AT + each for each in asked)])]
    assert places == sorted(places)
    assert places[0] >= 0 and places[-1] <= 1 + 1e-9
    assert all(0 <= place <= 1 + 1e-9 for place, _ in axis.ticks())


def test_weeks_without_a_broker_take_little_of_the_axis() -> None:
    axis = TimeAxis(AT, AT + 3600 + 30 * 86400, [(AT + 1800, AT + 1800 + 30 * 86400)])
    assert axis.at(AT + 1800) == pytest.approx(0.5 / 1.06)
    assert axis.at(AT + 1800 + 30 * 86400) == pytest.approx(0.56 / 1.06)
    texts = [text for _, text in axis.ticks()]
    assert 2 <= len(texts) <= 7 and all(re.fullmatch(r"\d\d:\d\d|\d\d \w{3}", t) for t in texts)


def test_long_pause_takes_little_of_the_axis() -> None:
    axis = TimeAxis(AT, AT + 40_000, [], [(AT + 100, AT + 39_900)])
    assert axis.at(AT + 100) > 0.4 and axis.at(AT + 39_900) < 0.6
    assert not axis.is_break(Point(AT, 0, 1.0), Point(AT + 40_000, 1, 1.0)), "the broker was there"


def test_times_of_a_run_are_those_between_its_lives(tmp_path: Path) -> None:
    lines = [closed(AT, 0, "a"), {**closed(AT + 50, 1, "a"), "epoch": "b1"}]
    axis = time_axis(facts_of(tmp_path, *lines, {**closed(AT + 60, 2, "a"), "epoch": "b1"}))
    assert (axis.began, axis.ended, axis.away) == (AT, AT + 60, [(AT, AT + 50)])


# Rows of workers.


def test_row_of_a_worker_has_what_happened_to_it(tmp_path: Path) -> None:
    shown = page(
        facts_of(
            tmp_path,
            event(AT, "a joins."),
            closed(AT + 10, 0, "a"),
            event(AT + 20, "A connection of a broke."),
            event(AT + 22, "a counts as dead: its connection closed."),
            event(AT + 50, "a joins."),
            event(AT + 60, "anna: a removed from the run."),
            line("stop", AT + 100, text="x"),
        )
    )
    assert shown.paths("here") == ["M0 3h200v14H0zM500 3h100v14H500z"]
    assert shown.paths("lost") == ["M200 3h20v14H200z"]
    assert len(shown.paths("active")) == 1
    for what in ("joined", "died", "kicked"):
        assert len(shown.paths(what)) == 2, "in the row, and in the key"
    assert len(shown.paths("back")) == 1, "which has one sign for both"
    assert "14 Nov 2023 22:13:42 UTC: a counts as dead: its connection closed." in shown.titles
    (told,) = (each for each in shown.titles if each.startswith("a: here for"))
    assert told.endswith(
        "1 push, counted as dead once, removed once, came back once; removed by an operator"
    )


def test_rows_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    names = [f"w{number:03}" for number in range(70)]
    shown = page(facts_of(tmp_path, closed(AT, 0, *names), closed(AT + 9, 1, *names)))
    assert shown.text("presence").count(" w0") + shown.text("presence").startswith("w0") == 50
    assert "20 workers with fewer contributions not shown" in shown.text("presence")


def test_text_is_markup_only_where_it_is_ours() -> None:
    inner = tag("b", "<i>")
    assert inner == "<b>&lt;i&gt;</b>" and isinstance(inner, Html)
    assert tag("p", inner, "&", title='"><') == (
        '<p title="&quot;&gt;&lt;"><b>&lt;i&gt;</b>&amp;</p>'
    )
