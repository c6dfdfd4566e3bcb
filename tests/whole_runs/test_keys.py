"""Keys, over real sockets: which are admitted, what each role may do, and what a revoked key ends."""

from pathlib import Path

import pytest
import zmq

from diloco_broker import Broker
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Operator
from diloco_protocol.errors import Refused, UsageError
from diloco_protocol.feed import TOPIC
from diloco_worker import DiLoCoClient
from kit.keyed_broker import file_of, forged, key, public_of, written
from kit.layers import Layers, delta, name_of
from kit.process_kit import PATIENCE_S, wait_for

pytest_plugins = ("kit.key_fixtures",)


def a_worker(keyed: Broker, folder: KeyFolder, name: str) -> DiLoCoClient:
    return DiLoCoClient(keyed.address, keys=file_of(folder, name), timeout=PATIENCE_S)


def test_workers_train_under_the_names_of_their_keys(keyed: Broker, folder: KeyFolder) -> None:
    with a_worker(keyed, folder, "w0") as one, a_worker(keyed, folder, "w1") as other:
        for each in (one, other):
            each.join(Layers(1))
        for each in (one, other):
            each.push({name_of(0): delta(0, 0)}, steps=1)
        assert one.pull().versions == other.pull().versions
        assert one.status()["round"]["number"] == 1
        assert [each["id"] for each in one.status()["workers"]] == ["w0", "w1"]


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("without a key", "requires a key"),
        ("with a forged key", "rejected the key"),
        ("display", "display may not train"),
    ],
)
def test_others_are_refused_at_once_with_a_sentence(
    keyed: Broker, folder: KeyFolder, tmp_path: Path, who: str, sentence: str
) -> None:
    keys = None if who == "without a key" else file_of(folder, "display")
    if who == "with a forged key":
        keys = written(forged(folder, "w0"), tmp_path / "other.key")
    client = DiLoCoClient(keyed.address, keys=keys, timeout=PATIENCE_S)
    with pytest.raises(Refused, match=sentence), client:
        client.join(Layers(1))


def test_worker_may_not_take_another_name_than_its_key_has(folder: KeyFolder) -> None:
    with pytest.raises(UsageError, match="'w1'"):
        DiLoCoClient("tcp://127.0.0.1:1", worker_id="w1", keys=file_of(folder, "w0"))


@pytest.mark.parametrize(
    ("name", "action", "is_done"),
    [
        ("anna", "pause", True),
        ("w0", "pause", False),
        ("display", "pause", False),
        ("display", "manifest", False),
        ("display", "status", True),
        ("w0", "status", True),
    ],
)
def test_operators_steer_and_others_read(
    keyed: Broker, folder: KeyFolder, name: str, action: str, is_done: bool
) -> None:
    with Operator(keyed.address, timeout=PATIENCE_S, keys=key(folder, name)) as operator:
        result = operator.ask(action)
    assert result.ok == is_done, result.text
    assert is_done or name in result.text


def test_feed_is_for_those_with_a_key(keyed: Broker, folder: KeyFolder) -> None:
    with zmq.Context() as context:
        readers = {}
        for name in ("display", "without a key"):
            reader = readers[name] = context.socket(zmq.SUB)
            reader.linger = 0
            reader.subscribe(TOPIC)
            if name == "display":
                key(folder, name).lock(reader)
            reader.connect(keyed.feed_address)
        assert readers["display"].poll(int(1000 * PATIENCE_S))
        assert not readers["without a key"].poll(100)
        context.destroy(linger=0)


def test_revoked_key_ends_the_session_and_a_new_one_lets_the_worker_back_in(
    keyed: Broker, folder: KeyFolder
) -> None:
    public = public_of(folder, "w0")
    with a_worker(keyed, folder, "w0") as revoked, a_worker(keyed, folder, "w1") as other:
        for each in (revoked, other):
            each.join(Layers(1))
        kept = public.read_text()
        public.unlink()
        wait_for(lambda: other.status()["counts"]["alive"] == 1)
        link = revoked._link
        assert link is not None
        wait_for(lambda: "rejected the key" in str(link.last_error))
        assert other.status()["counts"]["alive"] == 1
        public.write_text(kept)
        wait_for(lambda: other.status()["counts"]["alive"] == 2)
