"""Which curves a report has: of what, along which axis, in which words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from diloco_tools.monitor.report.drawing.axes import NumberAxis, TimeAxis
from diloco_tools.monitor.report.drawing.charts import Plot, bars, line_chart
from diloco_tools.monitor.report.drawing.markup import Html
from diloco_tools.monitor.report.drawing.wording import duration, norm, on_axis, quantity, rate
from diloco_tools.monitor.report.facts import Curve, Facts
from diloco_tools.monitor.report.history.digest import STALEST
from diloco_tools.monitor.report.thinning import Point

NO_LOSS = "No worker has told a loss: diloco.report(loss=loss) does."


def time_axis(facts: Facts) -> TimeAxis:
    """The time of a run; where one broker had ended and the next had not begun, there was none.

    A pause, too, takes no more of the axis than that.
    """
    away = [(before.ended_at, after.began_at) for before, after in pairwise(facts.lives)]
    return TimeAxis(facts.began_at, facts.ended_at, away, facts.pauses)


def figures(facts: Facts, axis: TimeAxis) -> list[Html]:
    """Everything that is a curve, and how stale contributions were.

    Each push of asynchronous mode makes a version, so its numbers are those of pushes. Workers are not
    shown one by one where there is only one, nor are their norms where these are of fragments in turn.
    """
    is_async = facts.mode == "async"
    word, mean = ("push", "of each push") if is_async else ("round", "mean of a round")
    time = ("Round time", "from opening to release")
    if is_async:
        time = ("Time between pushes", "from one version to the next")

    def along_rounds(points: Sequence[Point]) -> NumberAxis:
        return NumberAxis(points, word)

    def along_time(_: Sequence[Point]) -> TimeAxis:
        return axis

    def curves(key: str) -> tuple[Curve, ...]:
        return facts.curves.get(key, ())

    def of_rounds(plot: Plot, found: Sequence[Curve]) -> Html:
        return line_chart(plot, found, along_rounds)

    loss = Plot("Loss", mean, word=word, from_zero=False, empty=NO_LOSS)
    seconds = Plot(
        *time,
        word=word,
        format=duration,
        axis_format=lambda s: f"{on_axis(s)} s",
        may_jump=True,  # a pause, or a night without workers, belongs to its round
    )
    network = Plot("Network", "at the broker", word=word, format=rate, axis_format=rate)
    speed = Plot("Speed", "inner steps/s of each worker", word=word, format=quantity)
    found = [
        of_rounds(loss, curves("loss")),
        of_rounds(seconds, curves("seconds")),
        of_rounds(Plot("Pseudo-gradient norm", mean, word=word, format=norm), curves("norm")),
        line_chart(network, curves("network"), along_time),
    ]
    if not is_async:
        both = [
            Curve(name, each.points, each.count)
            for name in ("averaged", "alive")
            for each in curves(name)
        ]
        arrived = Plot("Workers", "averaged in the round, and alive", word=word, format=quantity)
        found.append(of_rounds(arrived, both))
    if len(curves("loss of workers")) > 1:
        each_loss = Plot("Loss of each worker", "", word=word, from_zero=False)
        found.append(of_rounds(each_loss, curves("loss of workers")))
    if len(curves("norm of workers")) > 1 and len(curves("norm")) == 1:
        each_norm = Plot("Pseudo-gradient norm of each worker", "", word=word, format=norm)
        found.append(of_rounds(each_norm, curves("norm of workers")))
    return [*found, line_chart(speed, curves("speed of workers"), along_time), _staleness(facts)]


def _staleness(facts: Facts) -> Html:
    def name(versions: int) -> str:
        return f"over {STALEST}" if versions > STALEST else str(versions)

    rows = [(name(versions), count) for versions, count in facts.staleness]
    unit = "versions between base and use, by contributions"
    return bars("Staleness", unit, rows, "No contribution yet.")
