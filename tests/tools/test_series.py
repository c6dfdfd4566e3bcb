"""Figures over time from snapshots: rounds without duplicates, rates by the broker's own uptime."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol.feed import LastRound, Loop, Snapshot, Totals, Worker
from diloco_tools.monitor.feed.series import Rate, RunSeries, recent_scale


def snapshot(
    sequence: int, uptime_s: float, *, up: int = 0, down: int = 0, **keys: Any
) -> Snapshot:
    totals = Totals(bytes_up=up, bytes_down=down)
    whole = {"feed": 1, "epoch": "a0", "totals": totals, **keys}
    return Snapshot(sequence=sequence, uptime_s=uptime_s, **whole)


def series_of(*news: tuple[Snapshot, float], **options: Any) -> RunSeries:
    """The series that have seen these snapshots, each at its time."""
    series = RunSeries(**options)
    for seen, now in news:
        series.update(seen, now)
    return series


class TestRounds:
    def test_each_closed_round_is_one_point(self) -> None:
        closed = LastRound(7, 2, seconds=41.2, averaged=3, loss=2.4, delta_norm=0.01, staleness=1)
        later = LastRound(8, seconds=2.0)
        rounds = (None, closed, closed, closed, later)
        news = ((snapshot(n, n, last_round=each), 100.0 + n) for n, each in enumerate(rounds))
        series = series_of(*news)
        assert series.rounds == [(101.0, closed), (104.0, later)]

    def test_a_restart_keeps_rounds_and_a_round_done_again_is_another_point(self) -> None:
        series = series_of(
            (snapshot(9, 9.0, last_round=LastRound(7)), 1.0),
            (snapshot(1, 1.0, epoch="b1"), 2.0),
            (snapshot(2, 2.0, epoch="b1", last_round=LastRound(7)), 3.0),
        )
        assert [(at, closed.number) for at, closed in series.rounds] == [(1.0, 7), (3.0, 7)]

    def test_the_oldest_points_go(self) -> None:
        news = [(snapshot(n, n, last_round=LastRound(n), up=n), float(n)) for n in range(10)]
        series = series_of(*news, points=3)
        assert [closed.number for _, closed in series.rounds] == [7, 8, 9]
        assert [rate.at for rate in series.network] == [7.0, 8.0, 9.0]


class TestScale:
    @pytest.mark.parametrize(
        ("values", "scale"),
        [
            # Older values far off are beyond it.
            ([99.0, 12.0, 11.0, 8.0, 5.0, 4.0, 3.0, 2.0], (2.0, 11.0)),
            # Nothing is cut off that has room.
            ([3.0, 1.0, 2.0, 1.5], (1.0, 3.0)),
            ([3.5, 3.0, 2.5, 2.0, 1.5, 1.0], (1.0, 3.5)),
            # Values that do not differ, or overflow, are shown whole.
            ([9.0, 2.0, 2.0, 2.0, 2.0], (2.0, 9.0)),
            ([-1.7e308, 1.7e308], (-1.7e308, 1.7e308)),
            ([5.0], (5.0, 5.0)),
        ],
    )
    def test_fits_the_newer_values(self, values: list[float], scale: tuple[float, float]) -> None:
        assert recent_scale(values) == scale


@pytest.mark.parametrize(
    ("news", "network"),
    [
        ([(snapshot(1, 10.0, up=1000), 100.0)], []),
        # Bytes over the uptime of the broker: a snapshot that came late took no longer.
        (
            [(snapshot(1, 10.0, up=1000), 100.0), (snapshot(2, 12.0, up=1500, down=4000), 107.3)],
            [Rate(107.3, 250.0, 2000.0)],
        ),
        # One that is not newer changes nothing.
        ([(snapshot(2, 2.0, up=10), 1.0), (snapshot(2, 3.0, up=20), 2.0)], []),
        ([(snapshot(2, 2.0, up=10), 1.0), (snapshot(1, 3.0, up=20), 2.0)], []),
        # A restart begins again instead of going below zero.
        (
            [
                (snapshot(8, 8.0, up=10**9), 8.0),
                (snapshot(1, 1.0, epoch="b1", up=100), 9.0),
                (snapshot(2, 2.0, epoch="b1", up=300), 10.0),
            ],
            [Rate(10.0, 200.0, 0.0)],
        ),
        # Figures that did not move on with the uptime (an event of a replayed run) are no rate.
        (
            [
                (snapshot(1, 60.0, up=600), 60.0),
                (snapshot(2, 60.0, up=600), 119.0),
                (snapshot(3, 120.0, up=1200), 120.0),
            ],
            [Rate(120.0, 10.0, 0.0)],
        ),
    ],
)
def test_network_rate_by_uptime(news: list[tuple[Snapshot, float]], network: list[Rate]) -> None:
    assert series_of(*news).network == network


def test_cpu_is_the_share_of_a_core_over_the_last_seconds_of_a_life() -> None:
    def at(sequence: int, spent: float, **keys: Any) -> tuple[Snapshot, float]:
        whole = {"uptime_s": float(sequence), "loop": Loop(cpu_s=spent), **keys}
        return snapshot(sequence, **whole), 0.0

    news = [at(n, n * (0.1 if n < 10 else 0.5)) for n in range(20)]
    assert series_of().cpu is series_of(news[0]).cpu is None
    assert series_of(*news).cpu == pytest.approx(0.5)
    anew = [at(n, n / 10, epoch="b1", uptime_s=0.5) for n in (1, 2)]
    assert series_of(*news, *anew).cpu is None, "no time has passed in the new life"


class TestWorkers:
    def test_speed_and_rate_of_each(self) -> None:
        a, b = Worker("a", steps_per_s=5.0, bytes_up=100), Worker("b")
        later = (replace(a, steps_per_s=6.0, bytes_up=400), replace(b, bytes_down=50))
        news = [(snapshot(1, 1.0, workers=(a, b)), 1.0), (snapshot(2, 3.0, workers=later), 3.0)]
        assert series_of(news[0]).rate_of("a") is None
        series = series_of(*news)
        assert series.speeds == {"a": [(1.0, 5.0), (3.0, 6.0)], "b": []}
        rates = [series.rate_of(name) for name in "abc"]
        assert rates == [Rate(3.0, 150.0, 0.0), Rate(3.0, 0.0, 25.0), None]

    @pytest.mark.parametrize(
        ("workers", "speeds", "has_rate"),
        [
            # The speed of a lost worker is not news.
            ([Worker("a", steps_per_s=5.0), Worker("a", steps_per_s=5.0, health="lost")], 1, True),
            # One that is gone has no rate and keeps its speeds.
            ([Worker("a", steps_per_s=5.0), Worker("a", steps_per_s=5.0), None], 2, False),
            # One that came again with less begins again.
            ([Worker("a", bytes_up=each) for each in (100, 200, 50)], 0, False),
        ],
    )
    def test_kept_figures(self, workers: list[Worker | None], speeds: int, has_rate: bool) -> None:
        series = series_of(
            *(
                (snapshot(n, n, workers=(each,) if each else ()), float(n))
                for n, each in enumerate(workers)
            )
        )
        assert series.speeds["a"] == [(float(n), 5.0) for n in range(speeds)]
        assert (series.rate_of("a") is not None) == has_rate

    def test_those_longest_gone_give_way_first(self) -> None:
        series = RunSeries(workers=3)

        def seen(sequence: int, *names: str) -> set[str]:
            workers = tuple(Worker(name, steps_per_s=1.0) for name in names)
            series.update(snapshot(sequence, sequence, workers=workers), now=float(sequence))
            return set(series.speeds)

        assert seen(1, "a", "b", "c") == {"a", "b", "c"}
        seen(2, "a", "c")
        seen(3, "c")
        assert seen(4, "c", "d") == {"a", "c", "d"}
        assert seen(5, "c", "d", "e", "f") == {"c", "d", "e"}
        assert seen(6, *"abcdefgh") == {"c", "d", "e"}
