"""Numbers at the extremes stop no run and no display, and what is refused has changed nothing.

Messages of any shape, in any order, are in `tests/fuzz/machine.py`.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgpack
import pytest

from diloco_broker.core.events import Received, Tick
from diloco_broker.core.operations.status import round_line
from diloco_protocol import messages
from diloco_protocol.errors import ProtocolError
from fuzz import machine
from kit.checked_refusals import checked_refusals
from kit.core_harness import FIGURES, RUN, Puppet, Stage, a_stage
from kit.noted_tensors import CHUNK_ELEMENTS, Payload


def is_shown(stage: Stage) -> None:
    """The feed, the status and the history can be made of it."""
    shown = stage.shown()
    assert len(json.dumps(shown, allow_nan=False)) < 20_000, "a message swamps the displays"
    messages.encode(messages.Result(1, True, "status", shown))
    for report in stage.reports:
        round_line(stage.state, report, FIGURES)


WHOLE = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1]
TINY, HUGE = [5e-324, 1e-310, 2.3e-308, 1e-30], [1e30, 1e308, float("inf")]
REAL = [0.0, -0.0, float("nan"), 2**63, 2**64 - 1, *TINY, *HUGE, *(-x for x in TINY + HUGE)]

# Each way to count pushes in every change; the others each night.
SLOW = (1, 2, 6, 7)
MODES = [
    pytest.param(mode, id=str(mode), marks=() if number in SLOW else pytest.mark.nightly)
    for number, mode in enumerate([*machine.MODES, {"max_delta_norm": 2.0}])
]


def members_say(worker: Puppet) -> Iterator[messages.Message]:
    """Every kind of message that has numbers, each as a well-behaved worker would say it."""
    token, base = worker.token(), worker.stage.version()
    chunks = worker.stage.state.versions[0].layout.chunks
    figures: dict[str, Any] = {"tokens": 5, "samples": 5, "loss": 1.0, "norm": 1.0}
    yield messages.Heartbeat(token, 7, 3, "training", 2.0, 1.5, 100, merge_delay=1)
    yield messages.Push(token, 99, 0, chunks, "fp32", base, 1.0, 4, **figures)
    yield messages.Chunk(0, 1, session=token, push_id=99)
    yield messages.Commit(token, 99, 0)
    yield messages.Take(
        token, 1, "text", 10, 2, 7, 3, (0, 2), (messages.Lot((99,), {"text": (0, 1)}),)
    )
    yield messages.Pull(0, 0, token, 2, base, b"\x01")
    yield messages.Pull(0, 0, None, 2)
    yield messages.Credit(2, token)
    yield messages.Credit(2)
    held = (base,) * worker.stage.config.num_fragments
    yield messages.Join(
        worker.worker_id, worker.stage.manifest, RUN, token, held, {"sync_every": 8}, pid=5
    )
    yield messages.Join(
        "new", worker.stage.manifest, wants={"fragment_update_alpha": 0.5}, extra={"x": 1.5}
    )
    for setting in ("outer_lr", "outer_momentum", "workers", "quorum", "grace", "save_every"):
        yield messages.Control("set", 1, {setting: 1.0 if setting in ("outer_lr", "grace") else 1})


def with_extremes(plain: Any) -> Iterator[Any]:
    """The same with one number in it changed, for each number and each extreme."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            if key != "v":
                yield from ({**plain, key: other} for other in with_extremes(value))
    elif isinstance(plain, list):
        for place, value in enumerate(plain):
            head, tail = plain[:place], plain[place + 1 :]
            yield from ([*head, other, *tail] for other in with_extremes(value))
    elif isinstance(plain, float):
        yield from REAL
    elif isinstance(plain, int) and not isinstance(plain, bool):
        yield from WHOLE


def trains(stage: Stage, *workers: Puppet) -> None:
    """Whoever else came is removed, a and b join again, and push until versions are made."""
    for stranger in stage.here - {"a", "b"}:
        stage.kicks(stranger)
    for worker in workers:
        worker.joins()
    stage.asks("set", outer_lr=0.5, outer_momentum=0.5, workers=2, grace=1.0)
    before = stage.shown()["totals"]["rounds"]
    for _ in range(stage.config.num_fragments):
        fragment = stage.round.fragment
        for worker in workers:
            worker.base = stage.version(fragment)
            worker.pushes(stage.state.draw(), fragment=fragment, tokens=3, samples=3)
        stage.passes(1.2)
    assert stage.shown()["totals"]["rounds"] > before, "no version is made any more"


def hears(stage: Stage, worker: Puppet, plain: dict[str, Any]) -> None:
    """What is in the header comes from the worker; the wire may refuse it, the core may not raise."""
    try:
        message = messages.decode(msgpack.packb(plain))
    except ProtocolError:
        return
    route = worker.control
    if isinstance(message, messages.Chunk) or (
        isinstance(message, messages.Credit) and message.session
    ):
        route = worker.bulk
    elif isinstance(message, messages.Join | messages.Control) or message.session is None:  # type: ignore[attr-defined]
        route = stage.route()
    stage.happens(Received(route, message, Payload(4 * CHUNK_ELEMENTS)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_number_at_an_extreme_stops_the_run_or_its_displays(mode: dict[str, Any]) -> None:
    stage = a_stage(workers=2, heartbeat_timeout=0.0, **mode)
    a, b = stage.joined("a", "b")
    for kind in range(len(list(members_say(a)))):
        trains(stage, a, b)
        sound = msgpack.unpackb(messages.encode(list(members_say(a))[kind]))
        if sound["kind"] in ("chunk", "commit"):
            a.begins(99, tokens=5)
        for plain in with_extremes(sound):
            hears(stage, a, plain)
            is_shown(stage)
            hears(stage, a, sound)
            stage.now += 0.5
            stage.happens(Tick())
    trains(stage, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_what_is_refused_has_changed_nothing(seed: int) -> None:
    dice = Random(seed)
    with checked_refusals():
        machine.run(dice.randbytes(dice.randint(200, 1500)))
