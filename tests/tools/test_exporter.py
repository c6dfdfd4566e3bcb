"""diloco-exporter: what a snapshot becomes, how it is named, and what it costs to be scraped.

The mapping is pure and tested so; scrapes go over HTTP to a running exporter that reads a socket bound
here, and are read by the parsers that prometheus_client has for both formats.
"""

import math
from typing import Any

import pytest

from diloco_protocol.errors import Code
from diloco_protocol.feed import Snapshot
from diloco_tools.exporter import catalogue
from diloco_tools.exporter.catalogue import Reading
from diloco_tools.exporter.labels import HELD_S, LONGEST_VALUE, Places, label_value
from diloco_tools.exporter.metrics import families
from diloco_tools.feed.model import FeedModel
from kit.exporter_scrapes import HOSTILE, Samples, everybody, exported, problems, status, worker
from kit.paths import ROOT

GUIDE = ROOT / "tools" / "EXPORTER.md"


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


class TestMapping:
    def test_every_figure_of_the_feed_has_its_metric(self) -> None:
        seen = exported(status(), received=8, unreadable=3)
        for name, value in {
            "diloco_feed_up": 1,
            "diloco_feed_age_seconds": 0,
            "diloco_feed_snapshots_received_total": 8,
            "diloco_feed_snapshots_missed_total": 0,
            "diloco_feed_frames_unreadable_total": 3,
            "diloco_broker_restarts_total": 0,
            "diloco_run_healthy": 0,  # b is lost
            "diloco_run_ended": 0,
            "diloco_broker_uptime_seconds": 8000,
            "diloco_broker_cpu_seconds_total": 312.5,
            "diloco_broker_resident_memory_bytes": 310_000_000,
            "diloco_broker_longest_turn_seconds": 0.0045,
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
            "diloco_uploaded_bytes_total": 150_000,
            "diloco_downloaded_bytes_total": 300_000,
            "diloco_outer_learning_rate": 0.75,
            "diloco_outer_momentum": 0.5,
            "diloco_outer_buffer_gradients": 4,
            "diloco_sync_every_steps": 500,
            "diloco_pending_submissions": 6,
            "diloco_waiting_submissions": 2,
            "diloco_model_parameters": 1000,
            "diloco_model_size_bytes": 4000,
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
            "diloco_round_workers_expected": 3,
            "diloco_round_workers_arrived": 1,
            "diloco_round_workers_missing": 2,
            "diloco_round_workers_floor": 2,
            "diloco_last_round_number": 411,
            "diloco_last_round_seconds": 41.25,
            "diloco_last_round_weight": 3,
            "diloco_last_round_loss": 2.375,
            "diloco_last_round_delta_norm": 0.0625,
            "diloco_last_round_staleness_versions": 1,
        }.items():
            assert seen.pop((name, ())) == value, name
        for name, value in {
            "diloco_worker_healthy": 1,
            "diloco_worker_heartbeat_age_seconds": 0.5,
            "diloco_worker_sync_age_seconds": 12.5,
            "diloco_worker_round": 411,
            "diloco_worker_steps_total": 205_712,
            "diloco_worker_inner_steps": 212,
            "diloco_worker_sync_every_steps": 250,
            "diloco_worker_steps_per_second": 5.25,
            "diloco_worker_loss": 2.5,
            "diloco_worker_staleness_versions": 1,
            "diloco_worker_tokens_total": 420_000,
            "diloco_worker_pushes_total": 410,
            "diloco_worker_refused_pushes_total": 2,
            "diloco_worker_uploaded_bytes_total": 38_000,
            "diloco_worker_downloaded_bytes_total": 76_000,
        }.items():
            assert seen.pop((name, ("a",))) == value, name
        for number in (0, 1):
            labels = (str(number),)
            assert seen.pop(("diloco_fragment_version", labels)) == 206 - number
            assert seen.pop(("diloco_fragment_buffered_gradients", labels)) == 2 - number
            assert seen.pop(("diloco_fragment_contributions_total", labels)) == 600 - 3 * number
        for name, *values in (
            ("diloco_exporter_build_info", "9.9"),
            ("diloco_build_info", "0.1.0"),
            ("diloco_settings_info", "balanced", "alpha", "poly", "mean", "equal"),
            ("diloco_run_info", "3fa2c1d09b11", "sync", "dn paper", "bf16", "fp32"),
        ):
            assert seen.pop((name, tuple(values))) == 1, name
        left = {name for name, labels in seen if not {"b", "c"} & set(labels)}
        assert left == {"diloco_run_state", "diloco_workers", "diloco_refused_pushes_total"}

    def test_a_state_is_one_of_few(self) -> None:
        def states(state: str) -> dict[str, float]:
            seen = exported(status(state=state))
            return {
                labels[0]: value
                for (name, labels), value in seen.items()
                if name == "diloco_run_state"
            }

        none = dict.fromkeys(("training", "waiting", "paused", "stopping", "other"), 0.0)
        assert states("paused") == none | {"paused": 1}
        assert states("asleep") == none | {"other": 1}

    def test_workers_are_counted_by_health(self) -> None:
        seen = exported(status(workers=[worker(n, health=h) for n, h in zip(
            "abcdef", ("ok", "ok", "slow", "stalled", "lost", "sleepy"), strict=True
        )]))  # fmt: skip
        for health, count in zip(
            ("ok", "slow", "stalled", "lost", "other"), (2, 1, 1, 1, 1), strict=True
        ):
            assert seen["diloco_workers", (health,)] == count

    def test_refused_pushes_go_by_the_known_reasons(self) -> None:
        def refused(**totals: Any) -> dict[str, float]:
            seen = exported(status(totals=totals))
            return {
                labels[0]: value
                for (name, labels), value in seen.items()
                if name == "diloco_refused_pushes_total"
            }

        none = dict.fromkeys([*(code.value for code in Code), "other"], 0.0)
        assert refused() == none
        codes = {"stale": 4, "made_up": 1, "x" * 1000: 2, "late": "many", "bad_push": None}
        assert refused(rejected=7, refused=codes) == none | {"stale": 4, "other": 3}
        assert refused(rejected=5) == none | {"other": 5}, "an older broker tells no reasons"

    def test_what_is_not_known_has_no_sample(self) -> None:
        seen = exported(
            status(
                model=None,
                round=None,
                last_round=None,
                checkpoint=None,
                sync_every=None,
                outer={"optimizer": "torch"},
                loop={},
                workers=[worker("a", round=None, steps_per_s=None, loss=None, sync_age_s=None)],
                fragments=[],
            )
        )
        gone = {
            "diloco_model_parameters", "diloco_round_age_seconds", "diloco_last_round_seconds",
            "diloco_checkpoint_age_seconds", "diloco_checkpoint_failed", "diloco_sync_every_steps",
            "diloco_outer_learning_rate", "diloco_outer_buffer_gradients", "diloco_fragments",
            "diloco_broker_cpu_seconds_total", "diloco_broker_longest_turn_seconds",
            "diloco_worker_round", "diloco_worker_loss", "diloco_worker_steps_per_second",
            "diloco_worker_sync_age_seconds", "diloco_fragment_version", "diloco_run_paused_seconds",
        }  # fmt: skip
        assert not gone & names(seen)
        assert gone <= {metric.name for metric in catalogue.catalogue()}

    def test_a_pause_and_a_failed_save_show(self) -> None:
        seen = exported(
            status(paused_for_s=5.0, checkpoint={"folder": "/x", "error": "disk full"}),
            later_s=2.0,
        )
        assert seen["diloco_run_paused_seconds", ()] == 7
        assert seen["diloco_checkpoint_failed", ()] == 1
        assert ("diloco_checkpoint_age_seconds", ()) not in seen

    def test_a_lost_worker_does_not_train(self) -> None:
        seen = exported(status(workers=[worker("b", health="lost")]))
        assert seen["diloco_worker_healthy", ("b",)] == 0
        assert not {"diloco_worker_inner_steps", "diloco_worker_steps_per_second"} & names(seen)

    def test_a_loss_that_is_not_finite_is_not_a_number(self) -> None:
        seen = exported(status(workers=[worker("a", loss=None, loss_is_finite=False)]))
        assert math.isnan(seen["diloco_worker_loss", ("a",)])

    def test_asynchronous_mode_has_no_rounds(self) -> None:
        seen = exported(status(mode="async"))
        assert not {name for name in names(seen) if name.startswith("diloco_round_")}
        assert "diloco_last_round_seconds" not in names(seen)
        assert seen["diloco_last_round_loss", ()] == 2.375

    def test_no_counter_is_below_zero_or_endless(self) -> None:
        totals = {"rounds": -1, "deaths": 3}
        seen = exported(status(totals=totals, loop={"cpu_s": math.inf}))
        assert seen["diloco_deaths_total", ()] == 3
        assert not {"diloco_rounds_total", "diloco_broker_cpu_seconds_total"} & names(seen)

    def test_fragments_with_series_are_bounded(self) -> None:
        seen = exported(status(fragments=[{"fragment": number} for number in range(1000)]))
        assert seen["diloco_fragments", ()] == 1000
        assert sum(name == "diloco_fragment_version" for name, _ in seen) == 256

    def test_before_the_first_round_no_round_is_shown(self) -> None:
        seen = exported(status(round={"number": 0, "floor": 2}))
        assert "diloco_round_age_seconds" not in names(seen)
        seen = exported(status(round={"number": 0, "expected": ["a"]}))
        assert "diloco_round_age_seconds" in names(seen)


class TestFreshness:
    def test_while_it_is_late_ages_go_on(self) -> None:
        seen = exported(status(), later_s=9.0)
        assert seen["diloco_feed_up", ()] == 1
        assert seen["diloco_feed_age_seconds", ()] == 9
        assert seen["diloco_round_age_seconds", ()] == 21.25
        assert seen["diloco_worker_heartbeat_age_seconds", ("a",)] == 9.5
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
        found = families(Reading(FeedModel()), 5.0, "9.9", everybody)
        values = {family.metric.name: family.samples[0][1] for family in found}
        assert values["diloco_feed_up"] == 0
        assert "diloco_feed_age_seconds" not in values

    def test_health_is_the_verdict_of_the_other_displays(self) -> None:
        assert exported(status(workers=[worker("a")]))["diloco_run_healthy", ()] == 1
        assert exported(status(state="waiting"))["diloco_run_healthy", ()] == 0

    def test_missed_snapshots_and_restarts_are_counted(self) -> None:
        model = FeedModel()
        for epoch, sequence in (("a", 1), ("a", 4), ("b", 1)):
            model.update(Snapshot(1, sequence, epoch), now=0.0)
        found = families(Reading(model), 0.0, "9.9", everybody)
        values = {family.metric.name: family.samples[0][1] for family in found}
        assert values["diloco_feed_snapshots_missed_total"] == 2
        assert values["diloco_broker_restarts_total"] == 1


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
        places = Places(5)
        assert places.take([long, label_value(long), "b"], 0.0) == {
            long: label_value(long),
            "b": "b",
        }

    def test_no_place_at_all_will_do(self) -> None:
        assert Places(0).take(["a"], 0.0) == {}


class TestNames:
    @pytest.mark.parametrize("metric", catalogue.catalogue(), ids=lambda metric: metric.name)
    def test_keep_the_rules_of_promtool(self, metric: catalogue.Metric) -> None:
        assert problems(metric.name, metric.kind, metric.help, metric.labels) == set()
        assert metric.name.startswith("diloco_")
        assert metric.help.endswith(".")
        assert "\n" not in metric.help

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

    def test_each_metric_is_there_once(self) -> None:
        all_names = [metric.name for metric in catalogue.catalogue()]
        assert len(all_names) == len(set(all_names))

    def test_the_guide_has_them_all(self) -> None:
        text = GUIDE.read_text()
        missing = [m.name for m in catalogue.catalogue() if f"`{m.name}`" not in text]
        assert not missing
