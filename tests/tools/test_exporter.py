"""diloco-exporter: what a snapshot becomes, and how it is named. All of it is pure."""

import math
import os
import re
from typing import Any

import pytest

from diloco_protocol.errors import Code
from diloco_tools.monitor.feed.listener import Reading
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.metrics.metrics import (
    HELD_S,
    LONGEST_VALUE,
    Places,
    RunCollector,
    label_value,
)
from kit.exporter_scrapes import (
    HOSTILE,
    METRICS,
    Samples,
    collector,
    exported,
    samples,
    scraped,
    status,
)
from kit.feed_snapshots import worker
from kit.paths import ROOT
from kit.top_text import UPDATE, matches

GUIDE = ROOT / "docs" / "metrics.md"


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def by_label(name: str, samples: Samples) -> dict[str, float]:
    return {labels[0]: value for (each, labels), value in samples.items() if each == name}


ONE = worker("a", sync_age_s=2.0)
OF_A_WORKER: list[tuple[dict[str, Any], list[str]]] = [
    ({"round": None}, ["round"]),
    ({"loss": None}, ["loss"]),
    ({"sync_age_s": None}, ["sync_age_seconds"]),
    ({"sync_every": 0}, ["sync_every_steps"]),
    ({"steps_per_s": None}, ["steps_per_second"]),
    ({"health": "lost"}, ["inner_steps", "steps_per_second"]),  # it does not train
]


class TestMapping:
    def test_every_figure_of_the_feed_has_its_metric(self) -> None:
        matches("exporter.txt", scraped(status(), received=8, unreadable=3))

    @pytest.mark.parametrize(
        ("state", "shown"), [("paused", "paused"), ("training", "training"), ("asleep", "other")]
    )
    def test_a_state_is_one_of_few(self, state: str, shown: str) -> None:
        none = dict.fromkeys(("training", "waiting", "paused", "stopping", "other"), 0)
        assert by_label("diloco_run_state", exported(status(state=state))) == none | {shown: 1}

    def test_workers_are_counted_by_health(self) -> None:
        healths = ("ok", "ok", "slow", "stalled", "lost", "sleepy")
        crew = [worker(str(number), health=health) for number, health in enumerate(healths)]
        seen = exported(status(workers=crew, dead=[worker("6", health="dead")]))
        assert by_label("diloco_workers", seen) == (
            {"ok": 2, "slow": 1, "stalled": 1, "lost": 1, "dead": 1, "other": 1}
        )

    @pytest.mark.parametrize(
        ("totals", "counted"),
        [
            ({}, {}),
            (
                {
                    "rejected": 7,
                    "refused": {
                        "stale": 4,
                        "made_up": 1,
                        "x" * 1000: 2,
                        "late": "many",
                        "bad_push": None,
                    },
                },
                {"stale": 4, "other": 3},
            ),
            ({"rejected": 5}, {"other": 5}),  # an older broker tells no reasons
        ],
        ids=["none", "some", "older broker"],
    )
    def test_refusals_are_counted_by_reason(
        self, totals: dict[str, Any], counted: dict[str, int]
    ) -> None:
        none = dict.fromkeys([*(code.value for code in Code), "other"], 0)
        seen = exported(status(totals=totals))
        assert by_label("diloco_refused_pushes_total", seen) == none | counted

    @pytest.mark.parametrize(
        ("keys", "gone"),
        [
            ({"model": None}, ["model_parameters", "model_size_bytes"]),
            ({"round": None}, ["round_age_seconds", "round_number"]),
            ({"round": {"number": 0, "floor": 2}}, ["round_age_seconds"]),  # before the first
            ({"last_round": None}, ["last_round_seconds", "last_round_loss"]),
            ({"checkpoint": None}, ["checkpoint_age_seconds", "checkpoint_failed"]),
            ({"checkpoint": {"error": "disk full"}}, ["checkpoint_age_seconds"]),
            ({"sync_every": None}, ["sync_every_steps"]),
            ({"outer": {"optimizer": "x"}}, ["outer_learning_rate", "outer_buffer_gradients"]),
            ({"loop": {}}, ["broker_cpu_seconds_total", "broker_longest_turn_seconds"]),
            ({"fragments": []}, ["fragments", "fragment_version"]),
            ({"fragment_delay_auto": True}, ["fragment_delay_steps"]),
            ({"fragment_merge": "rebase"}, ["fragment_alpha_ratio"]),
            ({"end": None}, ["end_limit_rounds", "end_made_tokens", "end_reached"]),
            ({"end": {"max_rounds": 9}}, ["end_limit_tokens", "end_limit_seconds"]),
            ({"orders": []}, ["order_waiting_workers", "order_saved_workers"]),
            ({"data_sets": []}, ["data_set_size_units", "data_set_counted_units_total"]),
            ({"data_sets": [{"name": "a", "size": 9}]}, ["data_set_epochs"]),
            ({"asynchronous": None}, ["dylu_enabled", "submission_slots"]),
            ({"mode": "async"}, ["round_number", "round_age_seconds", "last_round_seconds"]),
            # No counter is below zero or endless.
            ({"totals": {"rounds": -1}}, ["rounds_total"]),
            ({"loop": {"cpu_s": math.inf}}, ["broker_cpu_seconds_total"]),
            *(
                ({"workers": [ONE | keys]}, [f"worker_{name}" for name in gone])
                for keys, gone in OF_A_WORKER
            ),
        ],
        ids=str,
    )
    def test_what_is_not_known_has_no_sample(self, keys: dict[str, Any], gone: list[str]) -> None:
        left_out = {f"diloco_{name}" for name in gone}
        assert left_out <= names(exported(status(workers=[ONE])))
        assert not left_out & names(exported(status(**keys)))

    def test_fragments_with_series_are_bounded(self) -> None:
        seen = exported(status(fragments=[{"fragment": number} for number in range(1000)]))
        assert seen["diloco_fragments", ()] == 1000
        assert sum(name == "diloco_fragment_version" for name, _ in seen) == 256

    def test_orders_go_by_the_known_actions_and_data_sets_by_name(self) -> None:
        orders = [{"action": "dance", "waiting": ["a", "b"]}]
        sets = [{"name": f"{number}\n" * 50, "counted": number} for number in range(1000)]
        seen = exported(status(orders=orders, data_sets=sets))
        assert by_label("diloco_order_waiting_workers", seen) == {"other": 2}
        counted = by_label("diloco_data_set_counted_units_total", seen)
        assert list(counted.values()) == list(range(64))
        assert all(len(label) <= LONGEST_VALUE and label.isprintable() for label in counted)


class TestFreshness:
    def test_while_it_is_late_ages_go_on(self) -> None:
        seen = exported(status(), later_s=9.0)
        assert seen["diloco_feed_up", ()] == 1
        assert seen["diloco_feed_age_seconds", ()] == 9
        assert seen["diloco_round_age_seconds", ()] == 21.25
        assert seen["diloco_worker_heartbeat_age_seconds", ("a",)] == 9.4
        assert seen["diloco_checkpoint_age_seconds", ()] == 72.5

    def test_once_it_is_stale_nothing_of_the_snapshot_is_left(self) -> None:
        assert exported(status(), later_s=60.0, received=3, unreadable=1) == {
            ("diloco_exporter_build_info", ("9.9",)): 1,
            ("diloco_feed_up", ()): 0,
            ("diloco_run_healthy", ()): 0,
            ("diloco_feed_age_seconds", ()): 60,
            ("diloco_feed_snapshots_received_total", ()): 3,
            ("diloco_feed_snapshots_missed_total", ()): 0,
            ("diloco_feed_frames_unreadable_total", ()): 1,
            ("diloco_broker_restarts_total", ()): 0,
        }

    def test_before_the_first_snapshot_there_is_no_age(self) -> None:
        seen = samples(collector(Reading(FeedModel(), 5.0)).collect())
        assert seen["diloco_feed_up", ()] == 0
        assert "diloco_feed_age_seconds" not in names(seen)


class TestLabels:
    @pytest.mark.parametrize("text", HOSTILE, ids=ascii)
    def test_any_text_becomes_a_short_printable_value(self, text: str) -> None:
        value = label_value(text)
        assert len(value) <= LONGEST_VALUE
        assert value.isprintable()
        value.encode()

    def test_what_is_short_and_printable_stays_and_the_rest_stays_apart(self) -> None:
        assert label_value("a100-0") == "a100-0"
        assert label_value("größe-工作者") == "größe-工作者"
        assert len({label_value(text) for text in HOSTILE}) == len(HOSTILE)
        assert label_value("two\nlines").startswith("two?lines~")
        assert label_value("x" * 65).startswith("x" * 55 + "~")

    def test_the_first_to_come_have_places_and_keep_them(self) -> None:
        places = Places(2)
        assert places.take(["m", "n"], 0.0) == {"m": "m", "n": "n"}
        assert places.take(["a", "m", "n"], 1.0) == {"m": "m", "n": "n"}
        assert places.take(["a", "n"], 2.0) == {"n": "n"}, "the place of m is held"
        assert places.take(["a", "m", "n"], 3.0) == {"m": "m", "n": "n"}

    def test_a_place_is_free_once_its_worker_was_gone_for_long(self) -> None:
        places = Places(1)
        places.take(["a"], 0.0)
        assert places.take(["b"], HELD_S) == {}
        assert places.take(["b"], HELD_S + 1) == {"b": "b"}
        assert places.take(["a", "b"], HELD_S + 2) == {"b": "b"}

    def test_two_ids_that_look_the_same_have_one_series(self) -> None:
        long = "x" * 100
        given = Places(5).take([long, label_value(long), "b"], 0.0)
        assert given == {long: label_value(long), "b": "b"}


# What `promtool check metrics` has against names, written from its documentation.
OTHER_UNIT = re.compile(
    "minutes|hours|days|weeks|bits|inches|miles|pounds|calories|celsius|meters|grams|joules|volts|"
    "amperes|s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d|"
    "(?:pico|nano|micro|milli|centi|dec[ai]|hecto|kilo|kibi|mega|mebi|giga|gibi|tera|tebi|peta|pebi)"
    "(?:seconds|bytes|minutes|hours|days|weeks|bits)"
)
TYPES = {"counter", "gauge", "histogram", "summary", "untyped", "count", "sum", "bucket", "created"}


def is_well_named(name: str) -> bool:
    words = name.removesuffix("_total").removesuffix("_info").split("_")
    return (
        re.fullmatch("diloco(_[a-z][a-z0-9]*)+", name) is not None
        and not TYPES & {*words}
        and not {"info", "total", "seconds", "bytes"} & {*words[:-1]}
        and not any(map(OTHER_UNIT.fullmatch, words))
    )


class TestNames:
    def test_what_is_scraped_keeps_the_rules_of_promtool(self) -> None:
        every = RunCollector(lambda: Reading(FeedModel(), 0.0), "9.9", 9).describe()
        names = [metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
                 for metric in every]  # fmt: skip
        assert names == list(METRICS)
        assert len(names) == len(set(names))
        assert [name for name in names if not is_well_named(name)] == []
        assert all(metric.documentation.endswith(".") for metric in every)
        labels = {label for each in METRICS.values() for label in each}
        assert all(re.fullmatch("(?!le$|quantile$)[a-z][a-z_]*", label) for label in labels)

    def test_the_guide_has_them_all(self) -> None:
        every = RunCollector(lambda: Reading(FeedModel(), 0.0), "9.9", 9).describe()
        rows = []
        for (name, labels), metric in zip(METRICS.items(), every, strict=True):
            kind = name.rsplit("_", 1)[-1] if metric.type == "info" else metric.type
            listed = ", ".join(f"`{label}`" for label in labels)
            rows.append(f"| `{name}` | {kind} | {listed} | {metric.documentation} |")
        text = GUIDE.read_text()
        start = text.index(rows[0].split(" | ")[0])
        table = [line for line in text[start:].splitlines() if line.startswith("| `diloco_")]
        if UPDATE in os.environ:
            GUIDE.write_text(text[:start] + "\n".join(rows) + "\n")
            table = rows
        assert table == rows, f"set {UPDATE} to write it"
