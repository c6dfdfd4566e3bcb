"""What somebody claims of a size is checked before anything is made for it, and forgotten with them."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.rules.joining.room import bytes_per_parameter
from diloco_broker.core.state import model_source
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Join, Result, Welcome, decode, encode
from diloco_protocol.records import from_plain
from kit.core_harness import Puppet, Stage, a_config, a_manifest, a_stage, alone
from kit.noted_tensors import CHUNK_ELEMENTS


def is_taken(stage: Stage, chunks: int) -> bool:
    return stage.worker("a").joins(manifest=a_manifest(chunks)).last(Welcome) is not None


def test_model_that_is_larger_than_allowed_is_refused_with_both_numbers() -> None:
    stage = a_stage(max_parameters=3 * CHUNK_ELEMENTS)
    assert not is_taken(stage, 4)
    text = stage.puppets["a"].error().text
    assert f"{4 * CHUNK_ELEMENTS:,} elements" in text
    assert f"{3 * CHUNK_ELEMENTS:,} at most" in text
    assert "--max-parameters" in text
    assert stage.state.model.manifest is None
    assert is_taken(stage, 3)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 12),  # value, momentum, sum
        ({"outer": "sgd"}, 8),
        ({"outer": "dn"}, 16),
        ({"reply_dtype": "bf16"}, 14),
        ({"num_fragments": 4}, 9),  # the sum of one fragment at a time
        ({"workers": 5, "deterministic": True}, 18),  # 5 submissions in bf16 instead of the sum
        ({"workers": 5, "deterministic": True, "wire_dtype": "fp32"}, 28),
        ({"mode": "async", "staging_slots": 3, "outer": "nesterov"}, 14),
    ],
)
def test_bytes_of_a_parameter_are_what_the_options_ask_for(
    options: dict[str, Any], each: int
) -> None:
    config = a_config(**{"wire_dtype": "bf16", **options})
    assert bytes_per_parameter(config) == pytest.approx(each, rel=0.01)


def test_model_may_be_as_large_as_there_is_memory_for() -> None:
    stage = a_stage(reply_dtype="bf16")
    stage.state.memory_bytes = 8 * CHUNK_ELEMENTS * 14
    assert not is_taken(stage, 9)
    text = stage.puppets["a"].error().text
    assert "keeps 14.0 bytes of each" in text
    assert "--max-parameters 0" in text
    assert is_taken(stage, 7)


@pytest.mark.parametrize("memory", [None, 1])
def test_any_model_is_taken_where_nobody_bounds_it(memory: int | None) -> None:
    stage = a_stage(max_parameters=None if memory is None else 0)
    stage.state.memory_bytes = memory
    assert is_taken(stage, 500)


def test_model_of_the_run_is_not_measured_again() -> None:
    stage, _ = alone()
    stage.state.memory_bytes = 1
    assert stage.worker("b").joins().last(Welcome) is not None


def claims_and_dies(stage: Stage) -> None:
    claimant = stage.worker("claimant").joins(manifest=a_manifest(500))
    claimant.donates(indexes=[0])
    assert stage.tensors.chunks
    claimant.dies()
    stage.passes(2.0)


def test_claim_of_somebody_who_is_gone_is_forgotten() -> None:
    stage = a_stage(1)
    claims_and_dies(stage)
    model = stage.state.model
    assert (model.manifest, model.layout, model.run, model.donation.intakes) == (
        None,
        None,
        None,
        {},
    )
    assert not stage.state.versions.fragments
    assert not stage.tensors.chunks
    (a,) = stage.joined("a")  # brings another model
    a.pushes(1)
    assert stage.version().counter == 1
    assert stage.state.versions[0].layout.chunks == 3


def test_claim_stays_while_another_worker_has_that_model() -> None:
    stage = a_stage(1)
    claimant = stage.worker("claimant").joins()
    other = stage.worker("other").joins()
    claimant.donates(indexes=[0])
    claimant.dies()
    stage.passes(2.0)
    assert other.asked_for == [0]
    other.donates()
    assert stage.version().counter == 0


def test_model_of_a_run_stays_when_everybody_has_gone() -> None:
    stage, (a) = alone()
    a.leaves()
    assert stage.state.model.manifest is not None
    assert stage.version().counter == 0


def test_workers_are_refused_past_the_number_that_may_be_here() -> None:
    stage = a_stage(2, max_workers=2)
    a, _ = stage.joined("a", "b")
    c = stage.worker("c").joins()
    assert "2 workers already, and this broker takes 2 at most" in c.error().text
    a.joins()  # back on a new connection
    assert len(stage.state.members) == 2
    a.leaves()
    assert stage.worker("c").joins().last(Welcome) is not None


def test_names_of_those_whose_parameters_were_bad_go_with_them() -> None:
    stage = a_stage(2)
    for number in range(20):
        worker = stage.worker(f"w{number}").joins()
        worker.donates(indexes=[0], is_finite=False)
        worker.leaves()
    assert not stage.state.model.rejected_donors


def test_what_a_worker_wants_is_quoted_in_part() -> None:
    stage = a_stage()
    worker = Puppet(stage, "a", control=stage.route())
    wants = {"wire_dtype": "x" * 50_000, "y" * 50_000: 1}
    worker.sends(Join("a", a_manifest(), wants=wants))
    assert len(worker.error().text) < 300
    assert len(stage.logs[-1]) < 400


def test_manifest_is_packed_once_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, _ = alone()
    stage.asks("manifest")
    monkeypatch.setattr(model_source, "describe", pytest.fail)
    results = [stage.asks("manifest") for _ in range(3)]
    for result in results:
        assert from_plain(Manifest, result.data["manifest"], "manifest") == stage.manifest
        answer = decode(encode(result))
        assert isinstance(answer, Result)
        assert answer.text == result.text
        assert from_plain(Manifest, answer.data["manifest"], "manifest") == stage.manifest
        assert answer.data.keys() == {"manifest", "config", "plan", "pattern"}
