"""A relay with keys on both sides: it shows one to its parent, and asks its own workers for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_broker import Broker
from diloco_broker.relay.daemon import RelayBroker
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.errors import Refused, Unreachable
from diloco_protocol.roles import Peer, Role
from diloco_worker import DiLoCoClient
from kit.keyed_broker import GUESTS, file_of, forged
from kit.process_kit import PATIENCE_S
from kit.sites import Sites, a_model, asking, ledger_of, options, until

pytest_plugins = ("kit.process_fixtures",)


@pytest.fixture
def of_hub(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "hub")
    made.add_all([*GUESTS.values(), Peer(Role.WORKER, "north")])
    return made


@pytest.fixture
def of_site(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "site")
    made.add_all(GUESTS.values())
    return made


def key_of_north(folder: KeyFolder) -> Path:
    return folder.path / "clients" / "worker-north.key"


class Keyed(Sites):
    """A hub that asks for keys."""

    def __init__(self, of_hub: KeyFolder) -> None:
        super().__init__()
        self._keys_of_hub = of_hub

    def site(self, hub: Broker, keys: Path | Keys | None, of_site: KeyFolder | None) -> RelayBroker:
        found = find_keys(keys) if isinstance(keys, Path) else keys
        given = {} if of_site is None else {"keys": str(of_site.path)}
        relay = RelayBroker(options(workers=2, **given), hub.address, name="north", keys=found)
        self._serve(relay)
        return relay

    def worker_with(self, at: Broker, key: Path | None) -> DiLoCoClient:
        client = DiLoCoClient(at.address, keys=key, timeout=PATIENCE_S)
        self._opened.callback(client.leave)
        return client


@pytest.fixture
def sites(of_hub: KeyFolder) -> Iterator[Keyed]:
    with Keyed(of_hub) as made:
        yield made


def test_site_with_keys_of_its_own_trains_at_a_hub_with_others(
    sites: Keyed, of_hub: KeyFolder, of_site: KeyFolder
) -> None:
    hub = sites.hub(1, keys=str(of_hub.path))
    relay = sites.site(hub, key_of_north(of_hub), of_site)
    for name in ("w0", "w1"):
        client = sites.clients[name] = sites.worker_with(relay, file_of(of_site, name))
        client.join(a_model())
    sites.rounds(range(2), "w0", "w1")
    assert ledger_of(hub).keys() == {"north", "w0", "w1"}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "a worker of the hub"])
def test_stranger_to_the_site_is_refused_and_reaches_no_parent(
    sites: Keyed, of_hub: KeyFolder, of_site: KeyFolder, who: str
) -> None:
    hub = sites.hub(1, keys=str(of_hub.path))
    relay = sites.site(hub, key_of_north(of_hub), of_site)
    key = None if who == "nobody" else file_of(of_hub, "w0")
    with pytest.raises((Refused, Unreachable)):
        DiLoCoClient(relay.address, keys=key, timeout=1.0).join(a_model())
    assert relay._relay_loop._relay.session is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("nobody", "asks for a key"),
        ("somebody else", "this key"),
    ],
)
def test_relay_that_its_parent_does_not_let_in_ends_with_a_sentence(
    sites: Keyed, of_hub: KeyFolder, of_site: KeyFolder, who: str, sentence: str
) -> None:
    hub = sites.hub(1, keys=str(of_hub.path))
    relay = sites.site(hub, None if who == "nobody" else forged(of_hub, "w0"), None)
    with asking(relay.address):
        until(lambda: relay.why_it_failed is not None, "the relay ends")
    assert sentence in str(relay.why_it_failed)
    assert hub.address in str(relay.why_it_failed)
