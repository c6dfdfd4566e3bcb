"""Text for the demo, split by file into a held-out part and one shard for each worker.

By default it is the source code of Python's standard library, which every machine has. The split depends
only on the files and the number of shards, not on the seed, so all processes of a demo compute the
same one independently.
"""

import math
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Generated text (tables, help), parts that are not always installed (tests, IDLE), other packages.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data"}
    | {"ensurepip", "site-packages", "test", "tests", "turtledemo"}
)
HELD_OUT = 0.05  # of all bytes
LARGEST_DOCUMENT = 1 / 30  # of all bytes: longer files are cut, so one file can be split too
MOST_BYTES = 64 << 20  # 64 MiB: every process of the demo holds its own copy of the text
VALIDATION_WINDOWS = 512  # of the held-out text: every validation in a demo uses the same ones
FEWEST_WINDOWS = 8  # of each part


class DataError(Exception):
    """The text cannot be used; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Document:
    name: str  # of a file, or of a piece of one
    text: bytes


@dataclass(frozen=True)
class Text:
    """The training text of each worker, (bytes,) uint8, and validation windows with their targets."""

    shards: tuple[Tensor, ...]
    validation: tuple[Tensor, Tensor]


def load_text(
    path: Path | None, shards: int, context: int, windows: int = VALIDATION_WINDOWS
) -> Text:
    """The text under `path`, in this number of shards; DataError if it is too short."""
    held_out, parts = split_documents(read_documents(path), shards)
    texts = [
        as_tensor(part, context, f"shard {number} of {shards}") for number, part in enumerate(parts)
    ]
    judging = as_tensor(held_out, context, "the held-out text")
    return Text(tuple(texts), validation_windows(judging, windows, context))


def read_documents(path: Path | None = None) -> list[Document]:
    """The text to train on, in the same order on every call.

    `path` is a file, a folder (all text files in it except hidden ones) or None for the standard
    library. At most 64 MiB are read. Raises DataError if no text was found.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _files_in(root, SKIPPED_FOLDERS) if file.suffix == ".py"]
        if not files:
            raise DataError(
                f"no source files of the standard library in {root}; "
                "name a text file or a folder with --data"
            )
    elif path.is_file():
        root, files = path.parent, [path]
    elif path.is_dir():
        root, files = path, _files_in(path)
    else:
        raise DataError(f"{path} does not exist; --data takes a text file or a folder of them")

    documents: list[Document] = []
    left = MOST_BYTES
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        if not left:
            break
        try:
            text = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file} cannot be read ({error.strerror}); "
                "make it readable or name other text with --data"
            ) from error
        if text and b"\0" not in text:  # a NUL byte: not text
            documents.append(Document(file.relative_to(root).as_posix(), text[:left]))
            left -= len(documents[-1].text)
    if not documents:
        raise DataError(f"{path or root} holds no text; name a text file or a folder with --data")
    return documents


def _files_in(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """The files under `root`, without hidden ones and without the `skipped` folders."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # os.walk descends only into the folders that remain in this list.
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        found += [Path(folder, name) for name in files if name[0] != "."]
    return [file for file in found if file.is_file()]  # no pipes, no links to nowhere


def split_documents(
    documents: Sequence[Document], shards: int
) -> tuple[list[Document], list[list[Document]]]:
    """Hold out 5% of the bytes and distribute the rest over shards of about equal size, by document.

    No document is in two parts, and the held-out part does not depend on the number of shards. Documents
    longer than 1/30 of all bytes are first cut into contiguous pieces.
    """
    if shards < 1:
        raise DataError(f"the number of shards must be positive, got {shards}")
    total = sum(len(document.text) for document in documents)
    pieces = _cut(documents, math.ceil(LARGEST_DOCUMENT * total))
    random.Random(0).shuffle(pieces)
    held_out: list[Document] = []
    parts: list[list[Document]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    left = HELD_OUT * total
    for piece in pieces:
        if left > 0:
            held_out.append(piece)
            left -= len(piece.text)
        else:
            lightest = sizes.index(min(sizes))
            parts[lightest].append(piece)
            sizes[lightest] += len(piece.text)
    return held_out, parts


def _cut(documents: Sequence[Document], longest: int) -> list[Document]:
    """The documents, longer ones in contiguous pieces of this length."""
    pieces: list[Document] = []
    for document in documents:
        if len(document.text) <= longest:
            pieces.append(document)
            continue
        for start in range(0, len(document.text), longest):
            text = document.text[start : start + longest]
            pieces.append(Document(f"{document.name}[{start}:{start + len(text)}]", text))
    return pieces


def as_tensor(documents: Sequence[Document], context: int, what: str) -> Tensor:
    """The documents concatenated as (bytes,) uint8; DataError if they are too short."""
    text = b"".join(document.text for document in documents)
    needed = FEWEST_WINDOWS * (context + 1)
    if len(text) < needed:
        raise DataError(
            f"{what} has only {len(text)} bytes and needs {needed}; give more text with --data"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def training_batches(
    text: Tensor, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of `text`: pairs of (batch, context) int64, the second one byte later."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        windows = text[starts + window].long()
        yield windows[:, :-1], windows[:, 1:]


def validation_windows(text: Tensor, windows: int, context: int) -> tuple[Tensor, Tensor]:
    """At most `windows` windows spread evenly over `text`, which never overlap, as in training."""
    windows = min(windows, len(text) // (context + 1))
    stride = len(text) // windows
    chosen = torch.stack([text[i * stride : i * stride + context + 1] for i in range(windows)])
    return chosen[:, :-1].long(), chosen[:, 1:].long()


def batch_seed(seed: int, shard: int) -> int:
    """The seed of one worker's batches, distinct for each worker and each seed of a run."""
    return 1000 * seed + shard
