"""The protocol that broker and workers share: messages, frames, model layout, codecs, versions.

Pure functions and records, without sockets, threads, clocks or torch, except for `clients` (talk to a
broker over a socket) and `tensors` (torch). The specification is docs/specification.md.
"""

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import CHUNK_ELEMENTS, ModelLayout, Segment, lay_out
from diloco_protocol.errors import (
    Code,
    DilocoError,
    ProtocolError,
    Refused,
    Unreachable,
    UsageError,
)
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.frames import pack, unpack
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import PROTOCOL_VERSION, Message, RunConfig
from diloco_protocol.version import Counted, Ledger, VersionId

__all__ = [
    "Bitmap",
    "CHUNK_ELEMENTS",
    "Code",
    "Counted",
    "DilocoError",
    "FragmentPlan",
    "Kind",
    "Ledger",
    "Manifest",
    "Message",
    "ModelLayout",
    "PROTOCOL_VERSION",
    "ProtocolError",
    "Refused",
    "RunConfig",
    "Segment",
    "TensorEntry",
    "Unreachable",
    "UsageError",
    "VersionId",
    "lay_out",
    "pack",
    "unpack",
]
