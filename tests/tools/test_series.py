"""Figures over time from snapshots: rounds without duplicates, rates by the broker's own uptime."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.feed import LastRound, Snapshot, Totals, Worker
from diloco_tools.feed.series import Rate, RunSeries, recent_scale


def snapshot(
    sequence: int,
    uptime_s: float,
    *,
    epoch: str = "a0",
    last: LastRound | None = None,
    up: int = 0,
    down: int = 0,
    workers: tuple[Worker, ...] = (),
) -> Snapshot:
    return Snapshot(
        feed=1,
        sequence=sequence,
        epoch=epoch,
        uptime_s=uptime_s,
        last_round=last,
        totals=Totals(bytes_up=up, bytes_down=down),
        workers=workers,
    )


class TestRounds:
    def test_each_closed_round_is_one_point(self) -> None:
        series = RunSeries()
        closed = LastRound(7, 2, seconds=41.2, averaged=3, loss=2.4, delta_norm=0.01, staleness=1)
        series.update(snapshot(1, 1.0), now=100.0)
        for sequence in (2, 3, 4):
            series.update(snapshot(sequence, sequence, last=closed), now=99.0 + sequence)
        series.update(snapshot(5, 5.0, last=LastRound(8, seconds=2.0)), now=104.0)
        assert series.rounds == [(101.0, closed), (104.0, LastRound(8, seconds=2.0))]

    def test_a_restart_keeps_rounds_and_a_round_done_again_is_another_point(self) -> None:
        series = RunSeries()
        series.update(snapshot(9, 9.0, last=LastRound(7)), now=1.0)
        series.update(snapshot(1, 1.0, epoch="b1"), now=2.0)
        series.update(snapshot(2, 2.0, epoch="b1", last=LastRound(7)), now=3.0)
        assert [(at, closed.number) for at, closed in series.rounds] == [(1.0, 7), (3.0, 7)]

    def test_the_oldest_points_go(self) -> None:
        series = RunSeries(points=3)
        for number in range(10):
            series.update(
                snapshot(number, number, last=LastRound(number), up=number), now=float(number)
            )
        assert [closed.number for _, closed in series.rounds] == [7, 8, 9]
        assert [rate.at for rate in series.network] == [7.0, 8.0, 9.0]


class TestScale:
    def test_older_values_far_off_are_beyond_it(self) -> None:
        assert recent_scale([99.0, 12.0, 11.0, 8.0, 5.0, 4.0, 3.0, 2.0]) == (2.0, 11.0)

    def test_nothing_is_cut_off_that_has_room(self) -> None:
        assert recent_scale([3.0, 1.0, 2.0, 1.5]) == (1.0, 3.0)
        assert recent_scale([3.5, 3.0, 2.5, 2.0, 1.5, 1.0]) == (1.0, 3.5)

    def test_values_that_do_not_differ_or_overflow_are_shown_whole(self) -> None:
        assert recent_scale([9.0, 2.0, 2.0, 2.0, 2.0]) == (2.0, 9.0)
        assert recent_scale([-1.7e308, 1.7e308]) == (-1.7e308, 1.7e308)
        assert recent_scale([5.0]) == (5.0, 5.0)

    @given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
    def test_newer_half_is_always_on_the_scale(self, values: list[float]) -> None:
        least, most = recent_scale(values)
        assert min(values) <= least <= most <= max(values)
        newer = values[len(values) // 2 :]
        assert least <= min(newer) and max(newer) <= most


class TestNetwork:
    def test_is_bytes_over_the_uptime_of_the_broker(self) -> None:
        series = RunSeries()
        series.update(snapshot(1, 10.0, up=1000, down=0), now=100.0)
        assert series.network == []
        series.update(snapshot(2, 12.0, up=1500, down=4000), now=107.3)  # came late, took no longer
        assert series.network == [Rate(107.3, 250.0, 2000.0)]

    def test_a_snapshot_that_is_not_newer_changes_nothing(self) -> None:
        series = RunSeries()
        series.update(snapshot(2, 2.0, up=10), now=1.0)
        series.update(snapshot(2, 3.0, up=20, last=LastRound(1)), now=2.0)
        series.update(snapshot(1, 1.0, up=5), now=2.0)
        assert (series.network, series.rounds) == ([], [])

    def test_a_restart_begins_anew_instead_of_going_below_zero(self) -> None:
        series = RunSeries()
        series.update(snapshot(8, 8.0, up=10**9), now=8.0)
        series.update(snapshot(1, 1.0, epoch="b1", up=100), now=9.0)
        assert series.network == []
        series.update(snapshot(2, 2.0, epoch="b1", up=300), now=10.0)
        assert series.network == [Rate(10.0, 200.0, 0.0)]

    def test_figures_that_did_not_move_on_with_the_uptime_are_no_rate(self) -> None:
        series = RunSeries()
        series.update(snapshot(1, 60.0, up=600), now=60.0)
        series.update(snapshot(2, 60.0, up=600), now=119.0)  # an event of a replayed run
        series.update(snapshot(3, 120.0, up=1200), now=120.0)
        assert series.network == [Rate(120.0, 10.0, 0.0)]


class TestWorkers:
    def test_speed_and_rate_of_each(self) -> None:
        series = RunSeries()
        a, b = Worker("a", steps_per_s=5.0, bytes_up=100), Worker("b")
        series.update(snapshot(1, 1.0, workers=(a, b)), now=1.0)
        assert series.rate_of("a") is None
        a, b = replace(a, steps_per_s=6.0, bytes_up=400), replace(b, bytes_down=50)
        series.update(snapshot(2, 3.0, workers=(a, b)), now=3.0)
        assert series.speeds == {"a": [(1.0, 5.0), (3.0, 6.0)], "b": []}
        assert series.rate_of("a") == Rate(3.0, 150.0, 0.0)
        assert series.rate_of("b") == Rate(3.0, 0.0, 25.0)
        assert series.rate_of("c") is None

    def test_the_speed_of_a_lost_worker_is_not_news(self) -> None:
        series = RunSeries()
        series.update(snapshot(1, 1.0, workers=(Worker("a", steps_per_s=5.0),)), now=1.0)
        lost = Worker("a", steps_per_s=5.0, health="lost")
        series.update(snapshot(2, 2.0, workers=(lost,)), now=2.0)
        assert series.speeds["a"] == [(1.0, 5.0)]

    def test_one_that_is_gone_has_no_rate_and_keeps_its_speeds(self) -> None:
        series = RunSeries()
        for sequence in (1, 2):
            worker = Worker("a", steps_per_s=5.0, bytes_up=sequence)
            series.update(snapshot(sequence, sequence, workers=(worker,)), now=float(sequence))
        assert series.rate_of("a") is not None
        series.update(snapshot(3, 3.0), now=3.0)
        assert series.rate_of("a") is None
        assert len(series.speeds["a"]) == 2

    def test_one_that_came_again_with_less_begins_anew(self) -> None:
        series = RunSeries()
        for sequence, up in ((1, 100), (2, 200), (3, 50)):
            worker = Worker("a", bytes_up=up)
            series.update(snapshot(sequence, sequence, workers=(worker,)), now=float(sequence))
        assert series.rate_of("a") is None

    @pytest.mark.parametrize("places", [0, 1, 4])
    def test_no_more_than_there_are_places_for(self, places: int) -> None:
        series = RunSeries(workers=places)
        crowd = tuple(Worker(f"w{number}", steps_per_s=1.0) for number in range(10))
        for sequence in (1, 2):
            series.update(snapshot(sequence, sequence, workers=crowd), now=float(sequence))
        assert list(series.speeds) == [worker.id for worker in crowd[:places]]
        assert all(len(points) == 2 for points in series.speeds.values())

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
