"""What a key is good for, where a broker asks for keys."""

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core.events import KeysRevoked, Received
from diloco_protocol import messages
from diloco_protocol.roles import Peer, Role
from kit.core_harness import Stage, a_manifest

W0, W1 = Peer(Role.WORKER, "w0"), Peer(Role.WORKER, "w1")
ANNA, DISPLAY = Peer(Role.OPERATOR, "anna"), Peer(Role.MONITOR, "display")


@pytest.fixture
def stage() -> Stage:
    return Stage(BrokerConfig(workers=1, save_dir="run", keys="keys"))


def answers(stage: Stage, message: messages.Message, peer: Peer) -> list[messages.Message]:
    """The answers on a connection of its own."""
    route = stage.route()
    stage.happens(Received(route, message, peer=peer))
    return stage.inbox.get(route, [])


@pytest.mark.parametrize(
    ("message", "allowed"),
    [
        (messages.Join("w0", a_manifest()), {W0}),
        (messages.Join("w1", a_manifest()), {W1}),
        (messages.Join("anna", a_manifest()), set()),
        (messages.Control("save", 1), {ANNA}),
        (messages.Control("set", 1, {"outer_lr": 0.1}), {ANNA}),
        (messages.Control("kick", 1, {"worker": "w0"}), {ANNA}),
        (messages.Control("shutdown", 1), {ANNA}),
        (messages.Control("checkpoint", 1), {ANNA}),
        (messages.Control("piece", 1), {ANNA}),
        (messages.Control("nonsense", 1), {ANNA}),
        (messages.Control("manifest", 1), {ANNA, W0, W1}),
        (messages.Pull(0, credit=1), {ANNA, W0, W1}),
        (messages.Probe(1, 64), {ANNA, W0, W1}),
    ],
    ids=lambda value: getattr(value, "action", None) or getattr(value, "kind", ""),
)
def test_each_role_may_do_what_it_is_for(
    stage: Stage, message: messages.Message, allowed: set[Peer]
) -> None:
    for peer in (W0, W1, ANNA, DISPLAY):
        told = answers(stage, message, peer)
        errors = [each for each in told if isinstance(each, messages.Error)]
        refused = [each for each in errors if each.code == "not_allowed"]
        assert bool(refused) == (peer not in allowed), f"{peer}: {told}"
        assert all(peer.name in each.text for each in refused)


@pytest.mark.parametrize("thief", [W1, ANNA, DISPLAY], ids=str)
def test_session_token_is_worth_nothing_under_another_key(stage: Stage, thief: Peer) -> None:
    answers(stage, messages.Join("w0", a_manifest()), W0)
    owner = stage.state.members.named("w0")
    session = owner.session
    told, before = len(stage.inbox[owner.control]), owner.liveness.last_seen
    stage.now += 5
    for message in (
        messages.Heartbeat(session, 7),
        messages.Push(session, 1, 0, chunks=1, wire_dtype="fp32"),
        messages.Chunk(session=session, push_id=1, fragment=0, index=0),
        messages.Commit(session, 1, 0),
        messages.Pull(0, session=session),
        messages.Credit(4, session=session),
        messages.Take(session, 1, "text", 10, count=5),
        messages.Leave(session),
    ):
        route = stage.route()
        stage.happens(Received(route, message, b"1234", thief))
        assert [type(each) for each in stage.inbox[route]] == [messages.Rejoin], message
    assert stage.state.members.named("w0") is owner
    assert (owner.bulk, owner.liveness.last_seen, owner.figures.rejected) == (None, before, 0)
    assert len(stage.inbox[owner.control]) == told, "its owner was told of the thief's mistakes"


def test_log_of_actions_has_the_name_that_the_key_proves(stage: Stage) -> None:
    told = answers(stage, messages.Control("pause", 1, {"who": "another"}), ANNA)
    assert isinstance(told[-1], messages.Result) and told[-1].ok
    assert [(act.who, act.is_proven) for act in stage.acts] == [("the operator anna", True)]


def test_worker_whose_key_is_revoked_is_gone_at_once(stage: Stage) -> None:
    answers(stage, messages.Join("w0", a_manifest()), W0)
    stage.happens(KeysRevoked(frozenset({W0, DISPLAY})))
    assert "w0" not in stage.here
