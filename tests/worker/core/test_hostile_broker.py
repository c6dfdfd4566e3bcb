"""A broker that says what none says: the worker refuses it, or goes on as if nothing had been said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol.messages import Ack, Grant, Notice, Standing
from diloco_worker.core.compatibility import LEAST_HEARTBEAT_S, heartbeat_interval
from diloco_worker.core.connection import Phase
from diloco_worker.core.effects import JoinRefused
from diloco_worker.core.events import Disconnected, Offer
from kit.session_harness import CONFIG, Desk, desk, gradient, version


def uploading() -> Desk:
    """A worker with credit left for the push that it sends."""
    made = desk().connects().is_welcomed(version(0))
    made.happens(Offer(gradient()))
    made.hears(Grant(77, 0, Standing.NEW, None, 4))
    made.hears(Ack(77, 0, (0,), 50))
    return made


@pytest.mark.parametrize(
    "unsound",
    [
        {"chunk_elements": 0},
        {"chunk_elements": 2**40},
        {"fragment_update_alpha": float("nan")},
        {"fragment_update_alpha": -3.0},
        {"wire_dtype": "fp4"},
        {"reply_dtype": ""},
        {"weight_by": "__class__"},
    ],
)
def test_terms_that_cannot_be_followed_are_refused_with_the_value(unsound: dict[str, Any]) -> None:
    made = desk().connects().is_welcomed(version(0), config=replace(CONFIG, **unsound))
    (refusal,) = made.all(JoinRefused)
    (name,) = unsound
    assert refusal.final and f"The run has {name}" in refusal.text


def test_chunks_so_small_that_their_books_would_fill_the_memory_are_refused() -> None:
    from kit.core_harness import a_manifest

    made = desk(manifest=a_manifest(1_000_000)).connects()
    made.is_welcomed(version(0), config=replace(CONFIG, chunk_elements=1))
    (refusal,) = made.all(JoinRefused)
    assert "chunk_elements" in refusal.text


def test_time_that_is_next_to_nothing_makes_no_flood_of_heartbeats() -> None:
    assert heartbeat_interval(replace(CONFIG, heartbeat_timeout=1e-300), None) == LEAST_HEARTBEAT_S


def test_worker_that_is_removed_in_the_middle_of_an_upload_keeps_no_credit() -> None:
    made = uploading()
    made.hears(Notice("kicked", "An operator removed it."))
    assert made.session.phase is Phase.REFUSED
    assert not any(any(upload.credits) for upload in made.session.uploads)


def test_answers_to_what_was_not_asked_on_this_connection_give_no_credit() -> None:
    made = uploading()
    made.happens(Disconnected("It broke."))
    made.hears(Grant(77, 0, Standing.NEW, None, 4), Ack(77, 0, (1,), 9))
    assert not any(any(upload.credits) for upload in made.session.uploads)
