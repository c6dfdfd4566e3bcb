"""Maps that are packed once and sent often, by copying their bytes into headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import msgpack


class Packed(Mapping[str, Any]):
    """A map given by its msgpack bytes, which are unpacked only on access."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @cached_property
    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgpack.unpackb(self.packed)
        return plain

    def __getitem__(self, key: str) -> Any:
        return self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


def pack_with(plain: Mapping[str, Any], packed: Mapping[str, bytes]) -> bytes:
    """The msgpack map of plain and of packed values."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(plain) + len(packed))
    for key, value in plain.items():
        packer.pack(key)
        packer.pack(value)
    parts = [packer.bytes()]
    for key, done in packed.items():
        parts += [msgpack.packb(key), done]
    return b"".join(parts)
