"""diloco-exporter: what a snapshot becomes, and how it is named. All of it is pure."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diloco_protocol.errors import Code
from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_tools.exporter.catalogue import TABLES
from diloco_tools.exporter.metrics import HELD_S, LONGEST_VALUE, Places, RunCollector, label_value
from diloco_tools.feed.listener import Reading
from diloco_tools.feed.model import FeedModel
from kit.exporter_scrapes import HOSTILE, Samples, exported, of_reading, parsed, problems, status
from kit.feed_snapshots import frame, worker
from kit.paths import ROOT

NAMES = [f"diloco_{name}" for table in TABLES.values() for name in table]
GUIDE = ROOT / "tools" / "EXPORTER.md"


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def by_label(name: str, samples: Samples) -> dict[str, float]:
    return {labels[0]: value for (each, labels), value in samples.items() if each == name}


class TestMapping:
    def test_every_figure_of_the_feed_has_its_metric(self) -> None:
        seen = exported(status(), received=8, unreadable=3)
        of_the_run = {
            "diloco_feed_up": 1,
            "diloco_feed_age_seconds": 0,
            "diloco_feed_snapshots_received_total": 8,
            "diloco_feed_snapshots_missed_total": 0,
            "diloco_feed_frames_unreadable_total": 3,
            "diloco_broker_restarts_total": 0,
            "diloco_run_healthy": 0,  # b is lost
            "diloco_run_ended": 0,
            "diloco_broker_uptime_seconds": 8000,
            "diloco_broker_cpu_seconds_total": 312,
            "diloco_broker_resident_memory_bytes": 310_000_000,
            "diloco_broker_longest_turn_seconds": pytest.approx(0.00481),
            "diloco_workers_alive": 5,
            "diloco_workers_participating": 4,
            "diloco_workers_averaged": 3,
            "diloco_workers_wanted": 2,
            "diloco_workers_minimum": 1,
            "diloco_workers_without_series": 0,
            "diloco_deaths_total": 1,
            "diloco_rounds_total": 411,
            "diloco_pushes_total": 1644,
            "diloco_contributions_total": 1640,
            "diloco_malformed_messages_total": 9,
            "diloco_uploaded_bytes_total": 150_000_000_000,
            "diloco_downloaded_bytes_total": 300_000_000_000,
            "diloco_outer_learning_rate": 0.75,
            "diloco_outer_momentum": 0.5,
            "diloco_outer_buffer_gradients": 4,
            "diloco_sync_every_steps": 500,
            "diloco_pending_submissions": 6,
            "diloco_waiting_submissions": 2,
            "diloco_model_parameters": 151_200_000,
            "diloco_model_size_bytes": 604_800_000,
            "diloco_fragments": 2,
            "diloco_fragment_delay_steps": 3,
            "diloco_fragment_max_delay_steps": 9,
            "diloco_fragment_alpha_ratio": 0.25,
            "diloco_heartbeat_timeout_seconds": 90,
            "diloco_stall_timeout_seconds": 600,
            "diloco_disconnect_grace_seconds": 4,
            "diloco_dylu_enabled": 1,
            "diloco_dylu_minimum_steps": 8,
            "diloco_staleness_limit_versions": 6,
            "diloco_submission_slots": 2,
            "diloco_checkpoint_age_seconds": 63.5,
            "diloco_checkpoint_round": 410,
            "diloco_checkpoint_failed": 0,
            "diloco_round_number": 412,
            "diloco_round_fragment": 1,
            "diloco_round_age_seconds": 12.25,
            "diloco_round_closing": 1,
            "diloco_round_workers_expected": 4,
            "diloco_round_workers_arrived": 1,
            "diloco_round_workers_missing": 3,
            "diloco_round_workers_floor": 2,
            "diloco_last_round_number": 411,
            "diloco_last_round_seconds": 41.24,
            "diloco_last_round_weight": 3,
            "diloco_last_round_loss": 2.4131,
            "diloco_last_round_delta_norm": 0.0131,
            "diloco_last_round_staleness_versions": 1,
        }
        of_a = {
            "diloco_worker_healthy": 1,
            "diloco_worker_heartbeat_age_seconds": 0.4,
            "diloco_worker_sync_age_seconds": 12.5,
            "diloco_worker_round": 412,
            "diloco_worker_steps_total": 205_712,
            "diloco_worker_inner_steps": 212,
            "diloco_worker_sync_every_steps": 250,
            "diloco_worker_steps_per_second": 5.23,
            "diloco_worker_loss": 2.4131,
            "diloco_worker_staleness_versions": 1,
            "diloco_worker_tokens_total": 420_000_000,
            "diloco_worker_pushes_total": 411,
            "diloco_worker_refused_pushes_total": 2,
            "diloco_worker_uploaded_bytes_total": 38_000_000,
            "diloco_worker_downloaded_bytes_total": 76_400_000,
        }
        expected: dict[Any, Any] = {(name, ()): value for name, value in of_the_run.items()}
        expected |= {(name, ("a",)): value for name, value in of_a.items()}
        for number in (0, 1):
            labels = (str(number),)
            expected["diloco_fragment_version", labels] = 206 - number
            expected["diloco_fragment_buffered_gradients", labels] = 2 - number
            expected["diloco_fragment_contributions_total", labels] = 600 - 3 * number
        for name, *words in (  # by the names of their labels
            ("diloco_exporter_build_info", "9.9"),
            ("diloco_build_info", "0.1.0"),
            ("diloco_settings_info", "mean", "alpha", "balanced", "poly", "equal"),
            ("diloco_run_info", "sync", "dn paper", "fp32", "3fa2c1d09b11", "bf16"),
        ):
            expected[name, tuple(words)] = 1
        elsewhere = {"diloco_run_state", "diloco_workers", "diloco_refused_pushes_total"}
        assert expected == {
            (name, labels): value
            for (name, labels), value in seen.items()
            if name not in elsewhere and not {"b", "c"} & set(labels)
        }
        assert elsewhere < names(seen)

    @pytest.mark.parametrize(
        ("state", "shown"), [("paused", "paused"), ("training", "training"), ("asleep", "other")]
    )
    def test_a_state_is_one_of_few(self, state: str, shown: str) -> None:
        none = dict.fromkeys(("training", "waiting", "paused", "stopping", "other"), 0)
        assert by_label("diloco_run_state", exported(status(state=state))) == none | {shown: 1}

    def test_workers_are_counted_by_health(self) -> None:
        healths = ("ok", "ok", "slow", "stalled", "lost", "sleepy")
        crew = [worker(str(number), health=health) for number, health in enumerate(healths)]
        assert by_label("diloco_workers", exported(status(workers=crew))) == (
            {"ok": 2, "slow": 1, "stalled": 1, "lost": 1, "other": 1}
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
    def test_refused_pushes_go_by_the_known_reasons(
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
            ({"asynchronous": None}, ["dylu_enabled", "submission_slots"]),
            ({"mode": "async"}, ["round_number", "round_age_seconds", "last_round_seconds"]),
            # No counter is below zero or endless.
            ({"totals": {"rounds": -1}}, ["rounds_total"]),
            ({"loop": {"cpu_s": math.inf}}, ["broker_cpu_seconds_total"]),
        ],
        ids=str,
    )
    def test_what_is_not_known_has_no_sample(self, keys: dict[str, Any], gone: list[str]) -> None:
        left_out = {f"diloco_{name}" for name in gone}
        assert left_out <= names(exported(status()))
        assert not left_out & names(exported(status(**keys)))

    @pytest.mark.parametrize(
        ("keys", "gone"),
        [
            ({"round": None}, ["round"]),
            ({"loss": None}, ["loss"]),
            ({"sync_age_s": None}, ["sync_age_seconds"]),
            ({"sync_every": 0}, ["sync_every_steps"]),
            ({"steps_per_s": None}, ["steps_per_second"]),
            ({"health": "lost"}, ["inner_steps", "steps_per_second"]),  # it does not train
        ],
        ids=str,
    )
    def test_what_is_not_known_of_a_worker_has_no_sample(
        self, keys: dict[str, Any], gone: list[str]
    ) -> None:
        one = {"sync_age_s": 2.0} | keys
        assert not {f"diloco_worker_{name}" for name in gone} & names(
            exported(status(workers=[worker("a", **one)]))
        )

    def test_a_pause_and_a_failed_save_show(self) -> None:
        news = status(paused_for_s=5.0, checkpoint={"folder": "/x", "error": "disk full"})
        seen = exported(news, later_s=2.0)
        assert seen["diloco_run_paused_seconds", ()] == 7
        assert seen["diloco_checkpoint_failed", ()] == 1

    def test_a_worker_that_is_lost_or_whose_loss_is_not_finite_shows(self) -> None:
        one = worker("a", health="lost", loss=None, loss_is_finite=False)
        seen = exported(status(workers=[one]))
        assert seen["diloco_worker_healthy", ("a",)] == 0
        assert math.isnan(seen["diloco_worker_loss", ("a",)])

    def test_asynchronous_mode_has_a_last_version(self) -> None:
        assert exported(status(mode="async"))["diloco_last_round_loss", ()] == 2.4131

    def test_a_first_round_that_expects_somebody_is_shown(self) -> None:
        seen = exported(status(round={"number": 0, "expected": ["a"]}))
        assert seen["diloco_round_workers_expected", ()] == 1

    def test_fragments_with_series_are_bounded(self) -> None:
        seen = exported(status(fragments=[{"fragment": number} for number in range(1000)]))
        assert seen["diloco_fragments", ()] == 1000
        assert sum(name == "diloco_fragment_version" for name, _ in seen) == 256


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
        seen = of_reading(Reading(FeedModel(), 5.0))
        assert seen["diloco_feed_up", ()] == 0
        assert "diloco_feed_age_seconds" not in names(seen)

    def test_health_is_the_verdict_of_the_other_displays(self) -> None:
        assert exported(status(workers=[worker("a")]))["diloco_run_healthy", ()] == 1
        assert exported(status(state="waiting"))["diloco_run_healthy", ()] == 0

    def test_missed_snapshots_and_restarts_are_counted(self) -> None:
        model = FeedModel()
        for epoch, sequence in (("a", 1), ("a", 4), ("b", 1)):
            model.update(Snapshot(1, sequence, epoch), now=0.0)
        seen = of_reading(Reading(model, 0.0))
        assert seen["diloco_feed_snapshots_missed_total", ()] == 2
        assert seen["diloco_broker_restarts_total", ()] == 1


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

    def test_ever_new_names_cannot_fill_prometheus(self) -> None:
        places = Places(20)
        seen: set[str] = set()
        for second in range(3600):
            seen |= set(places.take([f"w{second}"], float(second)).values())
        assert len(seen) <= 20 * (1 + 3600 / HELD_S)

    def test_two_ids_that_look_the_same_have_one_series(self) -> None:
        long = "x" * 100
        given = Places(5).take([long, label_value(long), "b"], 0.0)
        assert given == {long: label_value(long), "b": "b"}

    def test_no_place_at_all_will_do(self) -> None:
        assert Places(0).take(["a"], 0.0) == {}


def all_metrics() -> Iterable[Any]:
    """Every metric as prometheus_client writes it and reads it again."""
    model = FeedModel()
    model.update(parse_snapshot(frame(status(paused_for_s=1.0))), now=0.0)
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: Reading(model, 0.0), "9.9", 9))
    return parsed(generate_latest(registry).decode())


class TestNames:
    def test_what_is_scraped_keeps_the_rules_of_promtool(self) -> None:
        seen = []
        for metric in all_metrics():
            name = metric.name + ("_total" if metric.type == "counter" else "")
            labels = {label for sample in metric.samples for label in sample.labels}
            assert problems(name, metric.type, metric.documentation, labels) == set(), name
            assert name.startswith("diloco_") and metric.documentation.endswith("."), name
            seen.append(name)
        assert seen == NAMES
        assert len(seen) == len(set(seen))

    @pytest.mark.parametrize(
        ("name", "kind", "problem"),
        [
            ("diloco_rounds", "counter", "_total is for counters, and each counter"),
            ("diloco_age_total", "gauge", "_total is for counters, and each counter"),
            ("diloco_age_ms", "gauge", "abbreviated unit"),
            ("diloco_age_milliseconds", "gauge", "no base unit"),
            ("diloco_age_hours", "gauge", "no base unit"),
            ("diloco_sent_megabytes_total", "counter", "no base unit"),
            ("diloco_seconds_of_age", "gauge", "its unit is not at the end"),
            ("diloco_age_gauge", "gauge", "its type in its name"),
            ("diloco_counter_of_rounds", "gauge", "its type in its name"),
            ("diloco:age", "gauge", "not snake case"),
            ("diloco_roundAge", "gauge", "not snake case"),
            ("diloco_worker_count", "gauge", "suffix of a histogram"),
        ],
    )
    def test_the_check_finds_what_is_wrong(self, name: str, kind: str, problem: str) -> None:
        assert problem in problems(name, kind, "Help.")
        assert problems("diloco_age_seconds", "gauge", "", ["workerId"]) == {"no help", "bad label"}

    def test_the_guide_has_them_all(self) -> None:
        text = GUIDE.read_text()
        assert not [name for name in NAMES if f"`{name}`" not in text]
