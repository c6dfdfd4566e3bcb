"""Workers whose manifest is too long for a header describe their model when they are asked."""

import hashlib
from dataclasses import replace

import msgpack
import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core.events import Received, Surroundings
from diloco_broker.core.members.descriptions import AT_A_TIME, GOES_ON_WITHIN_S, WHOLE_WITHIN_S
from diloco_protocol import messages
from diloco_protocol.description import PIECE_BYTES, DescriptionInProgress, describe, seconds_for
from diloco_protocol.manifest import Manifest
from diloco_protocol.records import to_plain
from kit.core_harness import Stage, layered

LARGE = layered(2000)
PIECES = list(describe(LARGE).pieces())


@pytest.fixture
def stage() -> Stage:
    return Stage(BrokerConfig(workers=1))


def asks(stage: Stage, worker_id: str, manifest: Manifest = LARGE) -> bytes:
    """A worker asks to join; returns its connection."""
    route = stage.route()
    stage.happens(Received(route, messages.in_a_header(messages.Join(worker_id, manifest))))
    return route


def announces(stage: Stage, worker_id: str, packed: bytes) -> bytes:
    """A worker asks to join with a model that is packed like this; returns its connection."""
    route, digest = stage.route(), hashlib.sha256(packed).digest()
    join = messages.Join(worker_id, None, digest=digest, size=len(packed))
    stage.happens(Received(route, join))
    return route


def told(stage: Stage, route: bytes) -> messages.Message:
    return stage.inbox[route][-1]


def refusal(stage: Stage, route: bytes) -> messages.Error:
    refused = told(stage, route)
    assert isinstance(refused, messages.Error)
    return refused


def is_welcome(stage: Stage, route: bytes) -> bool:
    return any(isinstance(each, messages.Welcome) for each in stage.inbox[route])


def describes(stage: Stage, route: bytes, *pieces: bytes) -> None:
    for piece in pieces:
        stage.happens(Received(route, messages.Describe(piece)))


def test_first_worker_describes_its_model_and_the_next_need_not(stage: Stage) -> None:
    first = asks(stage, "a")
    assert told(stage, first) == messages.Notice("describe")
    describes(stage, first, *PIECES[:-1])
    assert told(stage, first) == messages.Notice("describe")
    describes(stage, first, PIECES[-1])
    assert is_welcome(stage, first)
    second = asks(stage, "b")
    assert is_welcome(stage, second) and messages.Notice("describe") not in stage.inbox[second]
    assert not stage.state.descriptions


def test_other_model_is_refused_before_it_is_described(stage: Stage) -> None:
    describes(stage, asks(stage, "a"), *PIECES)
    other = asks(stage, "b", layered(3000))
    assert refusal(stage, other).code == "model_differs"
    assert not stage.state.descriptions


NO_MANIFEST = b"\xc1" * 10


@pytest.mark.parametrize(
    ("announced", "pieces"),
    [
        (describe(LARGE).packed, [*PIECES[:-1], PIECES[-1] + b"x"]),
        (describe(LARGE).packed, [*PIECES[:-1], PIECES[-1][:-1] + b"x"]),
        (describe(LARGE).packed, [b""]),
        (describe(LARGE).packed, [PIECES[0][:1]]),
        (NO_MANIFEST, [NO_MANIFEST]),
    ],
    ids=["too long", "damaged", "empty", "byte by byte", "not a manifest"],
)
def test_wrong_description_is_refused_and_forgotten(
    stage: Stage, announced: bytes, pieces: list[bytes]
) -> None:
    route = announces(stage, "a", announced)
    describes(stage, route, *pieces)
    assert refusal(stage, route)
    assert not stage.state.descriptions


def test_unasked_description_is_refused(stage: Stage) -> None:
    asks(stage, "a")
    other = stage.route()
    describes(stage, other, PIECES[0])
    refused = refusal(stage, other)
    assert (refused.code, refused.retry) == ("no_model", True)


def test_stalled_descriptions_free_their_places(stage: Stage) -> None:
    for number in range(AT_A_TIME):
        asks(stage, f"w{number}")
    late = asks(stage, "late")
    assert refusal(stage, late).retry
    stage.now += GOES_ON_WITHIN_S + 1
    stage.happens(Received(late, messages.in_a_header(messages.Join("late", LARGE))))
    assert told(stage, late) == messages.Notice("describe")


def test_worker_whose_description_stood_still_may_join_again(stage: Stage) -> None:
    route = asks(stage, "suspended")
    describes(stage, route, PIECES[0])
    stage.passes(GOES_ON_WITHIN_S + 1)
    describes(stage, route, PIECES[1])
    assert refusal(stage, route).retry
    stage.happens(Received(route, messages.in_a_header(messages.Join("suspended", LARGE))))
    describes(stage, route, *PIECES)
    assert is_welcome(stage, route)


def test_described_model_that_has_no_room_is_refused_as_a_join(stage: Stage) -> None:
    stage.happens(Surroundings(memory_bytes=1))
    route = asks(stage, "a")
    describes(stage, route, *PIECES)
    assert refusal(stage, route).about == "join"


@pytest.mark.parametrize("size", [0, -1, 1 << 40])
def test_claim_of_an_impossible_size_is_refused(stage: Stage, size: int) -> None:
    route = stage.route()
    named = messages.in_a_header(messages.Join("a", LARGE))
    stage.happens(Received(route, replace(named, size=size)))
    assert "8388608" in refusal(stage, route).text


def test_endless_description_is_dropped(stage: Stage) -> None:
    huge = messages.Join("slow", None, digest=bytes(32), size=8 << 20)
    route = stage.route()
    stage.happens(Received(route, huge))
    until = stage.now + WHOLE_WITHIN_S + seconds_for(huge.size)
    pieces = int((until - stage.now) / GOES_ON_WITHIN_S)
    for _ in range(pieces):
        stage.now += GOES_ON_WITHIN_S
        describes(stage, route, bytes(PIECE_BYTES))
        assert route in stage.state.descriptions
    stage.now = until + 1  # the last piece came just now
    asks(stage, "a")
    assert route not in stage.state.descriptions


def packed_another_way(manifest: Manifest) -> bytes:
    """The same, with the fields of each tensor in another order."""
    plain = to_plain(manifest)
    entries: list[dict[str, object]] = plain["entries"]
    return bytes(msgpack.packb({"entries": [dict(reversed(each.items())) for each in entries]}))


def test_digest_under_which_the_model_came_is_known(stage: Stage) -> None:
    packed = packed_another_way(LARGE)
    assert packed != describe(LARGE).packed
    first = announces(stage, "a", packed)
    pieces = [packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES)]
    describes(stage, first, *pieces)
    second = announces(stage, "b", packed)
    for route in (first, second, asks(stage, "c")):
        assert is_welcome(stage, route)
    assert messages.Notice("describe") not in stage.inbox[second]


def test_model_described_often_is_read_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    plain = DescriptionInProgress.manifest

    def manifest(progress: DescriptionInProgress) -> Manifest:
        read.append(progress.digest)
        return plain(progress)

    monkeypatch.setattr(DescriptionInProgress, "manifest", manifest)
    routes = [asks(stage, f"w{number}") for number in range(AT_A_TIME)]
    for route in routes:
        describes(stage, route, *PIECES)
        assert is_welcome(stage, route)
    assert read == [describe(LARGE).digest]
