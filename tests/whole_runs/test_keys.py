"""Keys, over real sockets: which are admitted, what each role may do, and what a revoked key ends.

A relay has keys on both sides: it shows one to its hub, and asks its own workers for theirs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from diloco_broker import Broker
from diloco_broker.relay.daemon import RelayBroker
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Keys, Operator, find_keys
from diloco_protocol.errors import Refused, Unreachable, UsageError
from diloco_protocol.feed import TOPIC
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoClient
from kit.keyed_broker import ALLOWED, file_of, forged, key, public_of, written
from kit.layers import Layers, delta, name_of
from kit.process_kit import PATIENCE_S, wait_for
from kit.sites import Sites, a_model, ledger_of

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
        ("display", "pause", False),
        ("display", "status", True),
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


def test_revoked_key_ends_the_session_until_it_is_back(keyed: Broker, folder: KeyFolder) -> None:
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


NORTH = Peer(Role.RELAY, "north")


@pytest.fixture
def of_hub(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "hub")
    made.add_all([*ALLOWED.values(), NORTH])
    return made


@pytest.fixture
def of_site(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "site")
    made.add_all(ALLOWED.values())
    return made


def key_of_north(folder: KeyFolder) -> Keys:
    found = find_keys(folder.path / "clients" / "relay-north.key")
    assert found is not None
    return found


class Keyed(Sites):
    """A hub and a site that ask for keys, each for its own."""

    def __init__(self, of_hub: KeyFolder, of_site: KeyFolder) -> None:
        super().__init__()
        self.of_hub, self.of_site = of_hub, of_site

    def site(self, hub: Broker, keys: Keys | None) -> RelayBroker:
        return self.begin_relay(hub, "north", keys, keys=str(self.of_site.path))

    def trained(self) -> tuple[Broker, RelayBroker]:
        """A hub, and a relay with workers `w0` and `w1`, after one round."""
        hub = self.hub(2, keys=str(self.of_hub.path))
        relay = self.site(hub, key_of_north(self.of_hub))
        for name in ("w0", "w1"):
            keys = file_of(self.of_site, name)
            client = self.clients[name] = DiLoCoClient(relay.address, keys=keys, timeout=PATIENCE_S)
            self._opened.callback(client.leave)
            client.join(a_model())
        self.rounds(range(1), "w0", "w1")
        return hub, relay

    def operator(self, at: Broker | RelayBroker, folder: KeyFolder) -> Operator:
        return Operator(at.address, timeout=PATIENCE_S, keys=key(folder, "anna"))


@pytest.fixture
def sites(of_hub: KeyFolder, of_site: KeyFolder) -> Iterator[Keyed]:
    with Keyed(of_hub, of_site) as made:
        yield made


def test_site_with_its_own_keys_trains_at_a_hub_with_others(sites: Keyed) -> None:
    hub, _ = sites.trained()
    assert {name: len(each) for name, each in ledger_of(hub).items()} == {"w0": 1, "w1": 1}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["without a key", "a worker of the hub", "a display"])
def test_peer_that_the_site_does_not_know_cannot_join_through_it(sites: Keyed, who: str) -> None:
    hub = sites.hub(1, keys=str(sites.of_hub.path))
    relay = sites.site(hub, key_of_north(sites.of_hub))
    wait_for(lambda: relay.is_connected)
    keys = {
        "without a key": None,
        "a worker of the hub": file_of(sites.of_hub, "w0"),
        "a display": file_of(sites.of_site, "display"),
    }[who]
    worker_id = "w9" if keys is None else None
    client = DiLoCoClient(relay.address, keys=keys, worker_id=worker_id, timeout=2.0)
    with client, pytest.raises((Refused, Unreachable)):
        client.join(a_model())
    assert len(hub._loop.core.state.members) == 0


@pytest.mark.slow
@pytest.mark.parametrize("who", ["without a key", "with a forged key", "a worker"])
def test_refused_relay_says_why(sites: Keyed, caplog: pytest.LogCaptureFixture, who: str) -> None:
    hub = sites.hub(1, keys=str(sites.of_hub.path))
    keys = {
        "without a key": None,
        "with a forged key": forged(sites.of_hub, "w0"),
        "a worker": key(sites.of_hub, "w0"),
    }[who]
    relay = sites.site(hub, keys)
    wait_for(
        lambda: any(r.name == "diloco.relay" and "key" in r.message for r in list(caplog.records))
    )
    assert not relay.is_connected


@pytest.mark.slow
def test_operator_of_the_site_reads_the_run_and_that_of_the_hub_steers_it(sites: Keyed) -> None:
    hub, relay = sites.trained()
    with sites.operator(relay, sites.of_site) as operator:
        assert not operator.ask("pause").ok
        assert not operator.ask("kick", worker="w0").ok
        assert operator.ask("status").data["counts"]["alive"] == 2
    with sites.operator(hub, sites.of_hub) as operator:
        assert operator.ask("kick", worker="w1").ok
        assert operator.ask("set", workers=1).ok
        sites.rounds(range(1, 2), "w0")
        assert operator.ask("status").data["counts"]["alive"] == 1
    assert len(ledger_of(hub)["w0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("revoked", "alive"), [("worker", 1), ("relay", 0)])
def test_revoked_key_ends_sessions_behind_a_relay(sites: Keyed, revoked: str, alive: int) -> None:
    hub, relay = sites.trained()
    if revoked == "worker":
        public_of(sites.of_site, "w1").unlink()
    else:
        (sites.of_hub.path / "allowed" / "relay" / "north.pub").unlink()
        wait_for(lambda: not relay.is_connected)
    with sites.operator(hub, sites.of_hub) as operator:
        wait_for(lambda: operator.ask("status").data["counts"]["alive"] == alive)
    assert ledger_of(hub).keys() == {"w0", "w1"}
