"""safetensors files, written from chunks and checked by their sum.

The format is eight bytes of header length, a JSON header, and the tensors' bytes end to end
(github.com/huggingface/safetensors, "Format"). The library writes tensors that lie in memory whole; ours
lie in chunks, so writing them with it would need another copy of the model. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diloco_protocol.codecs import as_bytes

_NAMES = {torch.float32: "F32", torch.int64: "I64"}
_PIECE = 1 << 20  # bytes read at a time for a checksum


Chunked = Sequence[Tensor]
"""One tensor, 1-D, as the chunks that it lies in, one after the other; at least one."""


def write(path: Path, tensors: Mapping[str, Chunked]) -> tuple[int, str]:
    """Write a file and flush it to the disk. Returns its size in bytes and its SHA-256.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, chunks in tensors.items():
        dtype, elements = chunks[0].dtype, sum(chunk.numel() for chunk in chunks)
        end = offset + elements * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": [elements],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on a multiple of eight bytes
    total = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in _pieces(text, tensors.values()):
            total.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), total.hexdigest()


def _pieces(text: bytes, tensors: Iterable[Chunked]) -> Iterable[bytes | memoryview]:
    yield struct.pack("<Q", len(text))
    yield text
    for chunks in tensors:
        for chunk in chunks:
            if chunk.numel():
                yield as_bytes(chunk)


def checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file; raises OSError when it cannot be read."""
    total = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
            size += len(piece)
    return size, total.hexdigest()
