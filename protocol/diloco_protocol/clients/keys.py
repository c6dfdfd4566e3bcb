"""The key that a worker, an operator or a monitor shows to a broker: a file of a few lines of JSON.

`diloco-broker keygen` makes it. It names its role and its owner, and holds the two halves of a CURVE key
pair and the public half of the broker's, so that a machine needs this one file and nothing else.
CURVE: http://curvezmq.org, in ZeroMQ as RFC 26.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role, check_name

VARIABLE = "DILOCO_KEYS"
# The folder of `keygen` in which the files to hand out lie.
HANDED_OUT = "clients"
# A key of CURVE in ZeroMQ's own text form (RFC 32).
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
LARGEST_FILE = 4096  # bytes; a key file has about 300


@dataclass(frozen=True)
class Keys:
    """What is in a key file.

    Attributes:
        peer: whom the broker takes its owner for.
        public, secret: the key pair, in Z85.
        broker: the public key of the broker, in Z85: the client speaks to no other broker.
    """

    peer: Peer
    public: bytes
    secret: bytes = field(repr=False)
    broker: bytes

    def lock(self, socket: zmq.Socket[Any]) -> None:
        """Let this socket, before it connects, speak to that broker only, and prove who it is."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.broker)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def as_plain(self) -> dict[str, object]:
        """What stands in the file."""
        return {
            "diloco_key": 1,
            "role": self.peer.role.value,
            "name": self.peer.name,
            "public": self.public.decode(),
            "secret": self.secret.decode(),
            "broker": self.broker.decode(),
        }


def find_keys(given: str | os.PathLike[str] | None, *roles: Role) -> Keys | None:
    """The key that was given, or that `DILOCO_KEYS` names; None where there is neither.

    Args:
        given: a key file, or the folder that `diloco-broker keygen` made, if it has one key of these
            roles to hand out. The first role that has one is taken.

    Raises:
        UsageError: what is wrong with it.
    """
    path = os.fspath(given) if given else os.environ.get(VARIABLE)
    if not path:
        return None
    file = Path(path).expanduser()
    return read_keys(_only_key_in(file, roles) if file.is_dir() else file)


def _only_key_in(folder: Path, roles: tuple[Role, ...]) -> Path:
    for role in roles:
        found = sorted((folder / HANDED_OUT).glob(f"{role.value}-*.key"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found[:10])
            raise UsageError(f"{folder / HANDED_OUT} has several keys; name the file: {names}.")
    wanted = " or ".join(role.value for role in roles)
    raise UsageError(
        f"{folder} is a folder without the key of a {wanted}; give the key file that diloco-broker "
        "keygen made for this machine."
    )


def read_keys(file: Path) -> Keys:
    """Read a key file.

    Raises:
        UsageError: it is not there, others may read it, or it is not a key file.
    """
    try:
        plain = plain_of(read_secret(file))
        role = plain.get("role")
        if role not in list(Role):
            raise ValueError("it is the broker's own" if role == "broker" else "it names no role")
        peer = Peer(Role(role), check_name(str(plain.get("name"))))
        keys = Keys(peer, *(key_of(plain, which) for which in ("public", "secret", "broker")))
    except OSError as error:
        raise UsageError(
            f"The key {file} cannot be read: {error.strerror}; give the key file that diloco-broker "
            "keygen made."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{file} is not a key of a worker, operator or monitor: {error}. diloco-broker keygen makes "
            "them."
        ) from None
    if zmq.curve_public(keys.secret) != keys.public:
        raise UsageError(
            f"The two halves of the key {file} do not belong together; make a new one."
        )
    return keys


def read_secret(file: Path) -> bytes:
    """The content of a file that only its owner may read.

    Raises:
        UsageError: others may read it. OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{file} is not a file; give the key file that keygen made.")
        if os.name == "posix" and mode & 0o077:
            raise UsageError(
                f"Other users of this machine may read the secret key {file}; run: chmod 600 {file}"
            )
        return opened.read(LARGEST_FILE)


def plain_of(text: bytes) -> dict[str, Any]:
    """The map that a key file holds. Raises ValueError."""
    try:
        plain = json.loads(text)
    except RecursionError:
        plain = None
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(plain, dict):
        raise ValueError("it is not a map")
    return plain


def key_of(plain: dict[str, Any], which: str) -> bytes:
    """One half of a pair, in Z85. Raises ValueError."""
    text = plain.get(which)
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise ValueError(f"its {which} key is not 40 characters of Z85")
    return text.encode()
