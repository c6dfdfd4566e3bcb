"""A relay with keys on both sides: it shows one to its hub, and asks its own workers for theirs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_broker import Broker
from diloco_broker.relay.daemon import RelayBroker
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Keys, Operator, find_keys
from diloco_protocol.errors import Refused, Unreachable
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoClient
from kit.keyed_broker import GUESTS, file_of, forged, key, public_of
from kit.process_kit import PATIENCE_S
from kit.sites import Sites, a_model, ledger_of, options, until

NORTH = Peer(Role.RELAY, "north")


@pytest.fixture
def of_hub(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "hub")
    made.add_all([*GUESTS.values(), NORTH])
    return made


@pytest.fixture
def of_site(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "site")
    made.add_all(GUESTS.values())
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
        """One that need not be let in."""
        given = {"keys": str(self.of_site.path)}
        relay = RelayBroker(options(**given), hub.address, name="north", keys=keys)
        self._serve(relay)
        return relay

    def of_two(self) -> tuple[Broker, RelayBroker]:
        """A hub, and a relay with workers `w0` and `w1`."""
        hub = self.hub(2, keys=str(self.of_hub.path))
        relay = self.site(hub, key_of_north(self.of_hub))
        for name in ("w0", "w1"):
            self.joins(relay, name)
        return hub, relay

    def joins(self, relay: RelayBroker, name: str) -> None:
        keys = file_of(self.of_site, name)
        client = self.clients[name] = DiLoCoClient(relay.address, keys=keys, timeout=PATIENCE_S)
        self._opened.callback(client.leave)
        client.join(a_model())


@pytest.fixture
def sites(of_hub: KeyFolder, of_site: KeyFolder) -> Iterator[Keyed]:
    with Keyed(of_hub, of_site) as made:
        yield made


def test_site_with_keys_of_its_own_trains_at_a_hub_with_others(sites: Keyed) -> None:
    hub, _ = sites.of_two()
    sites.rounds(range(2), "w0", "w1")
    assert {name: len(each) for name, each in ledger_of(hub).items()} == {"w0": 2, "w1": 2}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "a worker of the hub", "a display"])
def test_stranger_to_the_site_does_not_join_through_it(sites: Keyed, who: str) -> None:
    hub = sites.hub(1, keys=str(sites.of_hub.path))
    relay = sites.site(hub, key_of_north(sites.of_hub))
    until(lambda: relay.is_connected, "it is let in")
    keys = {
        "nobody": None,
        "a worker of the hub": file_of(sites.of_hub, "w0"),
        "a display": file_of(sites.of_site, "display"),
    }[who]
    client = DiLoCoClient(
        relay.address, keys=keys, worker_id="w9" if keys is None else None, timeout=2.0
    )
    with client, pytest.raises((Refused, Unreachable)):
        client.join(a_model())
    assert hub._loop.core.state.members.named("w9") is None
    assert len(hub._loop.core.state.members) == 0


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "a forger", "a worker"])
def test_relay_that_the_hub_does_not_let_in_says_why(
    sites: Keyed, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    hub = sites.hub(1, keys=str(sites.of_hub.path))
    keys = {
        "nobody": None,
        "a forger": forged(sites.of_hub, "w0"),
        "a worker": key(sites.of_hub, "w0"),
    }[who]
    relay = sites.site(hub, keys)
    word = "key"
    until(lambda: any(word in each.message for each in from_relay(caplog)), "it says why")
    assert not relay.is_connected


def from_relay(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in list(caplog.records) if each.name == "diloco.relay"]


@pytest.mark.slow
def test_operator_of_the_site_may_read_the_run_and_not_steer_it(sites: Keyed) -> None:
    _, relay = sites.of_two()
    keys = key(sites.of_site, "anna")
    with Operator(relay.address, timeout=PATIENCE_S, keys=keys) as operator:
        assert not operator.ask("pause").ok
        assert not operator.ask("kick", worker="w0").ok
        assert operator.ask("status").data["counts"]["alive"] == 2
    sites.rounds(range(1), "w0", "w1")


@pytest.mark.slow
def test_operator_of_the_hub_reaches_workers_behind_the_relay(sites: Keyed) -> None:
    hub, _ = sites.of_two()
    sites.rounds(range(1), "w0", "w1")
    with Operator(hub.address, timeout=PATIENCE_S, keys=key(sites.of_hub, "anna")) as operator:
        assert operator.ask("kick", worker="w1").ok
        assert operator.ask("set", workers=1).ok
        sites.rounds(range(1, 2), "w0")
        assert operator.ask("status").data["counts"]["alive"] == 1
    assert len(ledger_of(hub)["w0"]) == 2


@pytest.mark.slow
def test_relay_whose_key_is_revoked_is_gone_with_its_workers(sites: Keyed) -> None:
    hub, relay = sites.of_two()
    sites.rounds(range(1), "w0", "w1")
    (sites.of_hub.path / "allowed" / "relay" / "north.pub").unlink()
    until(lambda: not relay.is_connected, "the relay is shut out")
    with Operator(hub.address, timeout=PATIENCE_S, keys=key(sites.of_hub, "anna")) as operator:
        until(lambda: operator.ask("status").data["counts"]["alive"] == 0, "nobody is there")
    assert ledger_of(hub).keys() == {"w0", "w1"}


@pytest.mark.slow
def test_worker_whose_key_of_the_site_is_revoked_is_out(sites: Keyed) -> None:
    hub, _ = sites.of_two()
    sites.rounds(range(1), "w0", "w1")
    public_of(sites.of_site, "w1").unlink()
    with Operator(hub.address, timeout=PATIENCE_S, keys=key(sites.of_hub, "anna")) as operator:
        until(lambda: operator.ask("status").data["counts"]["alive"] == 1, "one is left")
