"""The key folder of a broker: its own key, and the public keys of allowed peers.

broker.key                    the broker's secret key; it stays on its machine
dashboard.key                 the monitor key of the page of `serve --dashboard`; it stays, too
allowed/worker/gpu-0.pub      gpu-0 may train; without this file it may not
allowed/operator/anna.pub
allowed/monitor/display.pub
clients/worker-gpu-0.key      for gpu-0's machine: its secret key and the broker's public key
README.txt                    explains this
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from diloco_protocol.clients.keys import HANDED_OUT, Keys, key_of, plain_of, read_secret
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role, check_name

BROKER_KEY, DASHBOARD_KEY = "broker.key", "dashboard.key"
README = "README.txt"
ALLOWED = "allowed"
LARGEST_PUBLIC = 1024  # bytes; a public key file has about 80
MOST_KEYS = 10_000
# Errors that mean that a file is missing or unreadable. Others are temporary and revoke no key.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP})

_README = """\
The keys of one DiLoCo broker, made by `diloco-broker keygen`.

broker.key        The broker's secret key. It stays on this machine:
                    diloco-broker serve --keys {folder}
dashboard.key     The key of the page of serve --dashboard, which creates it. It stays here, too.
clients/          One file for each machine or person. Move it there (scp, then delete it here). All
                  processes of one worker use the same file.
                    worker-NAME.key    trains: export DILOCO_KEYS=worker-NAME.key
                    operator-NAME.key  operates: diloco-broker status --keys operator-NAME.key
                    monitor-NAME.key   reads only: diloco-top --keys monitor-NAME.key
allowed/          The public keys that the broker accepts. To revoke one, remove its file: a running
                  broker notices within seconds and closes the connections.
                    rm allowed/worker/NAME.pub

More keys:        diloco-broker keygen {folder} NAME ...
To replace a key: rm allowed/worker/NAME.pub clients/worker-NAME.key, then keygen as above
New broker.key:   use a new folder with new keys for all: each client file has the broker's public key.
"""


@dataclass(frozen=True)
class AllowedKeys:
    """The peers that a broker allows.

    Attributes:
        by_key: peers by public key, in Z85.
        complaints: a sentence for each file that is not a valid public key.
    """

    by_key: dict[bytes, Peer]
    complaints: tuple[str, ...] = ()


class KeyFolder:
    """Reads and extends a key folder.

    Raises:
        UsageError: the folder is missing, its broker.key is invalid, or other users may write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not zmq.has("curve"):
            raise UsageError(
                "Keys need ZeroMQ with CURVE, which this one lacks; run: pip install pyzmq"
            )
        _check_writers(_folders(path))
        file = path / BROKER_KEY
        try:
            plain = plain_of(read_secret(file))
            self.public, self.secret = key_of(plain, "public"), key_of(plain, "secret")
            if plain.get("role") != "broker":
                raise ValueError('its "role" is not "broker"')
            if zmq.curve_public(self.secret) != self.public:
                raise ValueError("its public and secret key do not match")
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read: {error.strerror}. Make keys with: diloco-broker keygen {path}"
            ) from None
        except ValueError as error:
            raise UsageError(f"{file} is not a broker key: {error}.") from None

    @classmethod
    def make(cls, path: Path) -> KeyFolder:
        """Create the folder and a broker key, unless they exist.

        Raises:
            UsageError: its broker.key is missing although it has client keys, or as for the class.
            OSError: it cannot be written.
        """
        if not (path / BROKER_KEY).exists():
            if any(path.glob(f"{HANDED_OUT}/*.key")) or any(path.glob(f"{ALLOWED}/*/*.pub")):
                raise UsageError(
                    f"{path} has keys but not the broker.key that they were made for. Restore that "
                    "file, or remove the folder to make new keys."
                )
            for each in (*reversed(path.parents), *_folders(path), path / HANDED_OUT):
                each.mkdir(mode=0o700, exist_ok=True)
            _check_writers(_folders(path))
            if not (path / README).exists():
                _write(path / README, _README.format(folder=shlex.quote(str(path.resolve()))))
            public, secret = zmq.curve_keypair()
            pair = {"public": public.decode(), "secret": secret.decode()}
            _write(path / BROKER_KEY, _as_json({"diloco_key": 1, "role": "broker", **pair}))
        return cls(path)

    def add_all(self, peers: Iterable[Peer]) -> dict[Peer, Path]:
        """Make keys for these peers and allow them; returns the key file of each.

        Raises:
            UsageError: a peer has a key already or an invalid name; no key is made.
        """
        files = {
            peer: self.path / HANDED_OUT / f"{peer.role.value}-{check_name(peer.name)}.key"
            for peer in peers
        }
        self._add(files)
        return files

    def for_dashboard(self) -> Path:
        """The key of the broker's dashboard, created if it is missing.

        Raises:
            UsageError: its public key exists, but the key does not. OSError: it cannot be written.
        """
        file = self.path / DASHBOARD_KEY
        if not file.exists():
            self._add({Peer(Role.MONITOR, file.stem): file})
        return file

    def _add(self, files: Mapping[Peer, Path]) -> None:
        """Write the keys of these peers to these files, and their public keys to `allowed`."""
        allowed = {
            peer: self.path / ALLOWED / peer.role.value / f"{peer.name}.pub" for peer in files
        }
        for peer, file in files.items():
            there = shlex.join(str(each) for each in (allowed[peer], file) if os.path.lexists(each))
            if there:
                raise UsageError(
                    f"A key of {peer} exists already. To revoke it and make a new one, first run: "
                    f"rm {there}"
                )
        for peer, file in files.items():
            keys = Keys(peer, *zmq.curve_keypair(), broker=self.public)
            _write(file, _as_json(keys.as_plain()))
            _write(allowed[peer], _as_json({"diloco_key": 1, "public": keys.public.decode()}))

    def allowed(self) -> AllowedKeys:
        """Read the allowed public keys.

        Raises:
            OSError: a temporary error, which does not mean that a key was removed.
        """
        found: dict[bytes, Peer] = {}
        complaints = []
        for role, entry in self._entries():
            try:
                name = check_name(entry.name.removesuffix(".pub"))
                if not entry.is_file():  # opening a pipe would block the loop
                    raise ValueError("it is not a file")
                if os.name == "posix" and entry.stat().st_mode & 0o022:
                    there = shlex.quote(entry.path)
                    raise ValueError(f"other users may write to it; run: chmod go-w {there}")
                with open(entry.path, "rb") as file:
                    public = key_of(plain_of(file.read(LARGEST_PUBLIC)), "public")
                if public in found:
                    raise ValueError(f"it is the same as that of {found[public]}")
                found[public] = Peer(role, name)
            except (OSError, ValueError, UsageError) as error:
                _raise_if_it_passes(error)
                complaints.append(f"Ignored the key {entry.path}: {error}.")
        return AllowedKeys(found, tuple(complaints))

    def fingerprint(self) -> tuple[tuple[object, ...], ...]:
        """A value that changes when a file is added, removed or written. Raises as `allowed` does."""
        seen = []
        for _, entry in self._entries():
            try:
                now = entry.stat()
            except OSError as error:
                _raise_if_it_passes(error)
                continue  # removed meanwhile
            seen.append((entry.path, now.st_mtime_ns, now.st_ino, now.st_size, now.st_mode))
        return tuple(seen)

    def _entries(self) -> Iterator[tuple[Role, os.DirEntry[str]]]:
        count = 0
        for role in Role:
            try:
                with os.scandir(self.path / ALLOWED / role.value) as entries:
                    found = sorted(entries, key=lambda each: each.name)
            except OSError as error:
                _raise_if_it_passes(error)
                continue  # no folder, no keys of this role
            for entry in found:
                if entry.name.endswith(".pub") and count < MOST_KEYS:
                    count += 1
                    yield role, entry


def _raise_if_it_passes(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno not in _NOT_THERE:
        raise error


def _folders(path: Path) -> tuple[Path, ...]:
    """The folders whose content decides which peers are allowed."""
    return (path, path / ALLOWED, *(path / ALLOWED / role.value for role in Role))


def _check_writers(folders: Iterable[Path]) -> None:
    """Raise UsageError if other users may write: they could add their own keys."""
    for each in folders:
        try:
            found = each.stat()
        except OSError:  # missing, so it has no keys
            continue
        mode = found.st_mode
        if os.name == "posix" and found.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{each} belongs to another user of this machine, who could add keys; run: "
                f"chown {os.geteuid()} {shlex.quote(str(each))}"
            )
        if os.name == "posix" and mode & 0o022:
            raise UsageError(
                f"Other users of this machine may write to {each}, and could add keys; run: "
                f"chmod go-w {shlex.quote(str(each))}"
            )


def _write(path: Path, text: str) -> None:
    """Create a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _as_json(plain: dict[str, object]) -> str:
    return json.dumps(plain, indent=2) + "\n"
