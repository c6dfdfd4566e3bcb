"""The folder of keys that a broker goes by: its own, and the public halves of those it lets in.

broker.key                    the broker's secret; it never leaves its machine
dashboard.key                 that of the page of `serve --dashboard`: a monitor's, which stays, too
allowed/worker/gpu-0.pub      gpu-0 may train; without this file it may not
allowed/operator/anna.pub
allowed/monitor/display.pub
clients/worker-gpu-0.key      to be moved to that machine: its secret, and the broker's public half
README.txt                    says this
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
LARGEST_PUBLIC = 1024  # bytes; such a file has about 80
MOST_KEYS = 10_000
# What the system says of a file that is not there for us. Anything else passes, and takes no key back.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP})

_README = """\
The keys of one DiLoCo broker, made by `diloco-broker keygen`.

broker.key        The broker's secret. It stays on this machine:
                    diloco-broker serve --keys {folder}
dashboard.key     The key of the page that serve --dashboard starts, made by it. It stays here, too.
clients/          One file for each machine or person, to be moved there (scp, then delete it here). All
                  processes of one worker use the same file.
                    worker-NAME.key    a training script: export DILOCO_KEYS=worker-NAME.key
                    operator-NAME.key  steers: diloco-broker status --keys operator-NAME.key
                    monitor-NAME.key   only looks: diloco-top --keys monitor-NAME.key
allowed/          The public halves, which the broker goes by. To revoke a key, remove the
                  file: a broker that runs notices within seconds and closes the connections.
                    rm allowed/worker/NAME.pub

More keys:        diloco-broker keygen {folder} NAME ...
A new key for one who had one:
                  rm allowed/worker/NAME.pub clients/worker-NAME.key, then keygen as above
A new broker.key: a new folder, and new keys for all: each of their files names the broker's.
"""


@dataclass(frozen=True)
class Guests:
    """Whom a broker lets in.

    Attributes:
        by_key: by public key, in Z85.
        complaints: a sentence for each file that is not a public key.
    """

    by_key: dict[bytes, Peer]
    complaints: tuple[str, ...] = ()


class KeyFolder:
    """See the head of this module.

    Raises:
        UsageError: the folder or its broker.key is missing, or others may write there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not zmq.has("curve"):
            raise UsageError("This ZeroMQ has no CURVE, which keys need; run: pip install pyzmq")
        _check_writers(_folders(path))
        file = path / BROKER_KEY
        try:
            plain = plain_of(read_secret(file))
            self.public, self.secret = key_of(plain, "public"), key_of(plain, "secret")
            if plain.get("role") != "broker":
                raise ValueError('its "role" is not "broker"')
            if zmq.curve_public(self.secret) != self.public:
                raise ValueError("its two halves do not belong together")
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read: {error.strerror}. Make keys with: diloco-broker keygen {path}"
            ) from None
        except ValueError as error:
            raise UsageError(f"{file} is not a key of a broker: {error}.") from None

    @classmethod
    def make(cls, path: Path) -> KeyFolder:
        """Make the folder with a new key of a broker, unless it has one.

        Raises:
            UsageError: its broker.key is gone, or see the class. OSError: it cannot be written.
        """
        if not (path / BROKER_KEY).exists():
            if any(path.glob(f"{HANDED_OUT}/*.key")) or any(path.glob(f"{ALLOWED}/*/*.pub")):
                raise UsageError(
                    f"{path} has keys that were made for a broker.key which is gone, and are worth "
                    "nothing without it. Put it back, or remove the folder to make all of them anew."
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
        """Make keys for these and let them in; returns the file to hand out to each.

        Raises:
            UsageError: one of them has a key already, or a name that cannot be. No key is made then.
        """
        files = {
            peer: self.path / HANDED_OUT / f"{peer.role.value}-{check_name(peer.name)}.key"
            for peer in peers
        }
        self._add(files)
        return files

    def for_dashboard(self) -> Path:
        """The key of the broker's own web page, made where there is none.

        Raises:
            UsageError: its public half is there, but not the key. OSError: it cannot be written.
        """
        file = self.path / DASHBOARD_KEY
        if not file.exists():
            self._add({Peer(Role.MONITOR, file.stem): file})
        return file

    def _add(self, files: Mapping[Peer, Path]) -> None:
        """Make the keys in these files, and the public halves that the broker goes by."""
        allowed = {
            peer: self.path / ALLOWED / peer.role.value / f"{peer.name}.pub" for peer in files
        }
        for peer, file in files.items():
            there = shlex.join(str(each) for each in (allowed[peer], file) if os.path.lexists(each))
            if there:
                raise UsageError(
                    f"There is a key of {peer} already. To take it back and make a new one, first: "
                    f"rm {there}"
                )
        for peer, file in files.items():
            keys = Keys(peer, *zmq.curve_keypair(), broker=self.public)
            _write(file, _as_json(keys.as_plain()))
            _write(allowed[peer], _as_json({"diloco_key": 1, "public": keys.public.decode()}))

    def guests(self) -> Guests:
        """Read the public halves that are there now.

        Raises:
            OSError: the system cannot read now; it says nothing of who is there.
        """
        found: dict[bytes, Peer] = {}
        complaints = []
        for role, entry in self._entries():
            try:
                name = check_name(entry.name.removesuffix(".pub"))
                if not entry.is_file():  # to open a pipe would stop the loop
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
                complaints.append(f"{entry.path} is not a valid key and is ignored: {error}.")
        return Guests(found, tuple(complaints))

    def fingerprint(self) -> tuple[tuple[object, ...], ...]:
        """It differs where a file was added, removed or written since. Raises as `guests` does."""
        seen = []
        for _, entry in self._entries():
            try:
                now = entry.stat()
            except OSError as error:
                _raise_if_it_passes(error)
                continue  # removed in this moment
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
                continue  # the folder was removed: no key of this role
            for entry in found:
                if entry.name.endswith(".pub") and count < MOST_KEYS:
                    count += 1
                    yield role, entry


def _raise_if_it_passes(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno not in _NOT_THERE:
        raise error


def _folders(path: Path) -> tuple[Path, ...]:
    """Those that say who is let in."""
    return (path, path / ALLOWED, *(path / ALLOWED / role.value for role in Role))


def _check_writers(folders: Iterable[Path]) -> None:
    """Raise UsageError where others may write: they could let themselves in."""
    for each in folders:
        try:
            found = each.stat()
        except OSError:  # it is missing, so it has no keys
            continue
        mode = found.st_mode
        if os.name == "posix" and found.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{each} belongs to another user of this machine, who could let themselves in; run: "
                f"chown {os.geteuid()} {shlex.quote(str(each))}"
            )
        if os.name == "posix" and mode & 0o022:
            raise UsageError(
                f"Other users of this machine may write to {each}, and let themselves in; run: "
                f"chmod go-w {shlex.quote(str(each))}"
            )


def _write(path: Path, text: str) -> None:
    """A new file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _as_json(plain: dict[str, object]) -> str:
    return json.dumps(plain, indent=2) + "\n"
