"""The keys of one broker, by the names of those who have them; `key_fixtures` has the broker."""

import json
from pathlib import Path

import zmq

from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.roles import Peer, Role

ALLOWED = {
    "w0": Peer(Role.WORKER, "w0"),
    "w1": Peer(Role.WORKER, "w1"),
    "anna": Peer(Role.OPERATOR, "anna"),
    "display": Peer(Role.MONITOR, "display"),
}


def file_of(folder: KeyFolder, name: str) -> Path:
    return folder.path / "clients" / f"{ALLOWED[name].role.value}-{name}.key"


def public_of(folder: KeyFolder, name: str) -> Path:
    """What lets them in while it is there."""
    return folder.path / "allowed" / ALLOWED[name].role.value / f"{name}.pub"


def key(folder: KeyFolder, name: str) -> Keys:
    found = find_keys(file_of(folder, name))
    assert found is not None
    return found


def forged(folder: KeyFolder, name: str) -> Keys:
    """A key that names one of them and is not theirs."""
    return Keys(ALLOWED[name], *zmq.curve_keypair(), broker=folder.public)


def written(keys: Keys, path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text(json.dumps(keys.as_plain()))
    return path
