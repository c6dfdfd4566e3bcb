"""A past run from its history: every line a moment, damaged lines counted, figures of the last round."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_protocol import feed
from diloco_protocol.feed import Event, FeedError, LastRound, Loop, Snapshot, Totals, Worker
from diloco_protocol.records import field_names
from diloco_tools.monitor.feed import history_lines
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.feed.replay import Moment, read_history
from kit.past_runs import closed, event, line, start, write

# Every key that the lines of a history have.
OF_LINES = [
    *history_lines.OF_START,
    *(name for record in (LastRound, Totals, Loop) for name in field_names(record)),
    *("alive", "workers", "level", "text"),
]


def _is_finite(line: Any) -> bool:
    try:
        json.dumps(line, allow_nan=False)
    except ValueError:
        return False
    return True


def past(folder: Path, *lines: Any) -> Sequence[Moment]:
    history = read_history(write(folder / "history.jsonl", *lines))
    assert history.skipped == 0
    assert len(history) == len(lines)
    return history


def names(snapshot: Snapshot) -> list[str]:
    return [worker.id for worker in snapshot.workers]


class TestMoments:
    def test_a_round_is_shown_with_all_that_was_written_down(self, tmp_path: Path) -> None:
        moment = past(tmp_path, start(100.0), closed(160.0, 7, "a", "b", loss=None))[1]
        told: dict[str, Any] = {"round": 7, "sync_every": 500, "step": 3500}
        told |= {"steps_per_s": 12.5, "loss": 2.4}
        told |= {"sync_age_s": 0.0, "bytes_up": 3500, "bytes_down": 7000}
        last: dict[str, Any] = {"version": 8, "seconds": 40.0, "averaged": 2, "weight": 2.0}
        last["delta_norm"] = 0.01
        assert moment.at == 160.0
        assert moment.snapshot == Snapshot(
            feed=1,
            sequence=2,
            epoch="a0",
            run="3fa2c1d09b11",
            version="0.1.0",
            control="tcp://127.0.0.1:8512",
            uptime_s=60.0,
            mode="sync",
            state="training",
            round=feed.Round(7, phase="closed", expected=("a", "b"), arrived=("a", "b")),
            counts=feed.Counts(alive=2, participating=2, averaged=2),
            model=feed.Model(parameters=1000, tensors=4, bytes=4000),
            outer=feed.Outer("nesterov", lr=0.7, momentum=0.9),
            sync_every=500,
            num_fragments=1,
            workers_wanted=2,
            fragments=(feed.Fragment(0, version=8),),
            workers=tuple(Worker(name, host=f"host-of-{name}", **told) for name in "ab"),
            totals=Totals(rounds=1, contributions=2, bytes_up=7000, bytes_down=14000),
            last_round=LastRound(7, **last),
            loop=Loop(longest_turn_ms=4.0, cpu_s=1.5, rss_bytes=10**8),
        )
        raw = json.loads(json.dumps(moment.snapshot.raw, allow_nan=False))
        assert raw["num_fragments"] == 1

    def test_ages_go_on_between_rounds_and_figures_do_not(self, tmp_path: Path) -> None:
        left = event(175.0, "b left", level="warning")
        lines = [event(130.0, "b joined"), closed(160.0, 0, "a"), left]
        moments = past(tmp_path, start(100.0), *lines)
        seen = moments[3].snapshot
        assert seen.round is not None
        assert (seen.round.age_s, seen.workers[0].beat_age_s, seen.uptime_s) == (15.0, 15.0, 60.0)
        assert seen.events == (Event(1, 45.0, text="b joined"), Event(2, 0.0, "warning", "b left"))
        assert moments[0].snapshot.events == ()

    def test_before_its_first_round_a_run_waits(self, tmp_path: Path) -> None:
        seen = past(tmp_path, start(100.0, run=None, model=None))[0].snapshot
        assert (seen.run, seen.model, seen.last_round, seen.round) == (None, None, None, None)
        assert (seen.state, seen.waiting_for) == ("waiting", "for the first round to close")
        assert (seen.workers, seen.fragments) == ((), ())

    def test_settings_are_those_that_held_then(self, tmp_path: Path) -> None:
        """What was pending when they were written down is not a setting."""
        reducer = {"quorum": 2, "submissions": 3, "waiting": 1}
        moments = past(
            tmp_path,
            event(99.0, "listening"),
            start(100.0, settings={"reducer": reducer}),
            closed(110.0, 0, "a"),
            start(115.0, settings={"outer": {"optimizer": "nesterov", "lr": 0.5}}),
            closed(120.0, 1, "a"),
        )
        assert [moment.snapshot.outer.lr for moment in moments] == [0.7, 0.7, 0.7, 0.5, 0.5]
        assert moments[3].snapshot.last_round is not None
        assert moments[3].snapshot.last_round.number == 0
        told = moments[2].snapshot.reducer
        assert (told.quorum, told.submissions, told.waiting) == (2, 0, 0)

    def test_the_last_twenty_events_are_kept_with_the_end(self, tmp_path: Path) -> None:
        lines = [event(float(number), f"event {number}") for number in range(29)]
        stop = line("stop", 30.0, text="SIGTERM")
        seen = past(tmp_path, start(0.0), closed(5.0, 0, "a"), *lines, stop)[-1].snapshot
        texts = [f"event {n}" for n in range(10, 29)] + ["The broker stopped: SIGTERM."]
        assert [(each.sequence, each.text) for each in seen.events] == list(enumerate(texts, 11))
        assert (seen.state, names(seen)) == ("stopping", ["a"])

    def test_a_restart_keeps_only_the_events(self, tmp_path: Path) -> None:
        moments = past(
            tmp_path,
            start(0.0),
            closed(5.0, 0, "a", "b"),
            event(6.0, "b died"),
            start(100.0, epoch="b1"),
            closed(130.0, 1, "c", epoch="b1"),
        )
        fresh, later = moments[3].snapshot, moments[4].snapshot
        assert (fresh.epoch, fresh.workers, fresh.last_round) == ("b1", (), None)
        assert (fresh.totals.rounds, fresh.uptime_s) == (0, 0.0)
        assert [each.text for each in fresh.events] == ["b died"]
        assert (names(later), later.totals.rounds, later.uptime_s) == (["c"], 1, 30.0)
        model = FeedModel()
        assert all(model.update(moment.snapshot, moment.at) for moment in moments)
        assert (model.missed, model.restarts) == (0, 1)


class TestWorkers:
    def test_those_that_contributed_last_are_shown(self, tmp_path: Path) -> None:
        """In asynchronous mode each line has one contributor."""
        lines = [closed(float(n), n, name, alive=3) for n, name in enumerate("abcabd")]
        seen = past(tmp_path, start(0.0, mode="async"), *lines)[-1].snapshot
        assert names(seen) == ["a", "b", "d"], "c was here longest ago"
        assert [worker.round for worker in seen.workers] == [3, 4, 5]
        assert [worker.sync_age_s for worker in seen.workers] == [2.0, 1.0, 0.0]

    def test_each_fragment_has_its_newest_version(self, tmp_path: Path) -> None:
        lines = [closed(float(n), n, "a", fragment=n % 3, version=n // 3 + 1) for n in range(5)]
        seen = past(tmp_path, start(0.0, settings={"num_fragments": 3}), *lines)[-1].snapshot
        versions = [(each.fragment, each.version) for each in seen.fragments]
        assert versions == [(0, 2), (1, 2), (2, 1)]


class TestFiles:
    def test_the_older_file_comes_first(self, tmp_path: Path) -> None:
        older = write(tmp_path / "history.1.jsonl", start(0.0), closed(5.0, 0, "a"))
        assert len(read_history(tmp_path)) == 2, "a folder will do"
        path = write(tmp_path / "history.jsonl", closed(9.0, 1, "a"))
        moments = read_history(path)
        assert [moment.at for moment in moments] == [0.0, 5.0, 9.0]
        assert [*read_history(tmp_path)] == [*moments]
        assert moments[2].snapshot.mode == "sync"
        older.unlink()
        os.link(path, older)
        assert len(read_history(path)) == 1

    @pytest.mark.parametrize(
        "damaged",
        [
            b'{"kind": "round", "at": 1.0, "epo',
            b"\xff\xfe\x00\x01",
            b"null",
            b"[" * 100_000,
            b'{"kind": "event"}',
            event(1.0, "x") | {"kind": ["event"]},
            *[event(at, "x") for at in (math.nan, -1.0, True)],
            start(1.0) | {"settings": [1]},
            start(1.0, settings={"sync_every": "often"}),
            closed(1.0, 0, "a") | {"number": None},
            closed(1.0, 0, "a", workers=[{"host": "h"}]),
            closed(1.0, 0, "a", alive=1 << 70),
            b'{"kind": "event", "at": 1, "epoch": "a0", "text": "' + b"x" * (5 << 20) + b'"}',
        ],
        ids=lambda damaged: repr(damaged)[:40],
    )
    def test_a_damaged_line_is_counted_and_passed_over(self, tmp_path: Path, damaged: Any) -> None:
        lines = (start(0.0), damaged, closed(5.0, 0, "a"), event(6.0, "x"))
        path = write(tmp_path / "history.jsonl", *lines)
        history = read_history(path)
        assert history.skipped == 1
        assert [moment.at for moment in history] == [0.0, 5.0, 6.0]
        assert history[-1].snapshot.last_round is not None

    def test_cut_empty_or_newer_lines_cost_nothing_else(self, tmp_path: Path) -> None:
        odd = line("weather", 2.0, sky="blue")
        lines = (start(0.0), b"", b"  ", odd, closed(5.0, 0, "a", mood="good"))
        path = write(tmp_path / "history.jsonl", *lines)
        path.write_bytes(path.read_bytes() + b'{"kind": "round", "at": 9')
        history = read_history(path)
        assert (len(history), history.skipped) == (2, 1)

    def test_a_clock_that_was_set_back_makes_no_age_negative(self, tmp_path: Path) -> None:
        seen = past(tmp_path, start(100.0), closed(50.0, 0, "a"), event(20.0, "x"))[-1].snapshot
        assert seen.round is not None
        ages = (seen.round.age_s, seen.uptime_s, seen.workers[0].beat_age_s, seen.events[0].age_s)
        assert ages == (0.0, 0.0, 0.0, 0.0)

    @given(
        kind=st.sampled_from(["start", "round", "event", "stop"]),
        key=st.sampled_from(OF_LINES),
        of_worker=st.sampled_from([None, *field_names(Worker)]),
        value=st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(1 << 70), 1 << 70),
            st.floats(),
            st.text(max_size=3),
            st.lists(st.integers(), max_size=2),
            st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
        ),
    )
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_whatever_a_line_holds_is_counted_as_damaged_or_shown(
        self, tmp_path: Path, kind: str, key: str, of_worker: str | None, value: Any
    ) -> None:
        line = {"start": start(1.0), "round": closed(1.0, 0, "a")}.get(kind, event(1.0, "x"))
        line |= {"kind": kind}
        if of_worker is not None and kind == "round":
            line["workers"][0][of_worker] = value
        else:
            line[key] = value
        history = read_history(write(tmp_path / "history.jsonl", start(0.0), line))
        assert len(history) + history.skipped == 2
        seen = history[-1].snapshot
        again = feed.parse_snapshot(feed.TOPIC + json.dumps(seen.raw, allow_nan=False).encode())
        assert replace(again, raw={}) == replace(seen, raw={}) or not _is_finite(line)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "no such file"),
            (b"", ""),
            (b"hello\nworld\n", "2 damaged lines"),
            ("a pipe", "not a file"),
            (b"x" * 101, "101 bytes"),
        ],
    )
    def test_no_history_is_one_sentence(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        content: bytes | str | None,
        words: str,
    ) -> None:
        monkeypatch.setattr(history_lines, "MAX_FILE_BYTES", 100)
        path = tmp_path / "history.jsonl"
        if isinstance(content, str):
            os.mkfifo(path)
        elif content is not None:
            path.write_bytes(content)
        with pytest.raises(FeedError) as raised:
            read_history(path)
        sentence = str(raised.value)
        assert str(path) in sentence and words in sentence
        assert "\n" not in sentence
