"""Manifests: names, shapes, dtypes and order of a model's tensors; and differences between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

# Differences named in a refusal; a different model has hundreds, and the first few identify it.
DIFFERENCES_NAMED = 5

# Elements of a model: 200,000 chunks, each of which has state. Far more than any host can store.
MAX_ELEMENTS = 10**11
MAX_DIMENSIONS = 16

# Prefixes that DDP and torch.compile add to names of wrapped modules.
IN_DDP = "module."
COMPILED = "_orig_mod."

FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGER_DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "bool"})


class Kind(str, Enum):
    """The role of a tensor in training."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"
    BUFFER = "buffer"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the model."""

    name: str  # its key in the model's `state_dict`
    shape: tuple[int, ...]  # () for a scalar
    dtype: str  # torch's name without the prefix: "float32", "bfloat16", "int64", ...
    kind: Kind  # float buffers that have infinities at the start (causal masks) are frozen too
    aliases: tuple[str, ...] = ()  # other keys of the same tensor (tied weights are sent once)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def is_floating_point(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} {self.kind.value}"


@dataclass(frozen=True)
class Manifest:
    """The tensors of a model, in their order in the flat vectors."""

    entries: tuple[TensorEntry, ...]

    @property
    def trainable_elements(self) -> int:
        return sum(e.elements for e in self.entries if e.kind is Kind.TRAINABLE)

    def problems(self) -> list[str]:
        """Clauses that say why this manifest is unusable; empty if it is valid."""
        found = []
        seen: set[str] = set()
        for entry in self.entries:
            for name in (entry.name, *entry.aliases):
                if name in seen:
                    found.append(f"the name {name!r} occurs twice")
                seen.add(name)
            if len(entry.shape) > MAX_DIMENSIONS:
                return [f"{entry.name} has {len(entry.shape)} dimensions"]
            if any(size < 0 for size in entry.shape):
                found.append(f"{entry.name} has a negative size in its shape {list(entry.shape)}")
            if entry.dtype not in FLOAT_DTYPES | INTEGER_DTYPES:
                found.append(f"{entry.name} has the dtype {entry.dtype}, which cannot be exchanged")
            elif entry.kind is Kind.TRAINABLE and not entry.is_floating_point:
                found.append(f"{entry.name} is trainable but has the integer dtype {entry.dtype}")
        if sum(abs(entry.elements) for entry in self.entries) > MAX_ELEMENTS:
            found.append(f"it has more than {MAX_ELEMENTS:.0e} elements")
        if self.trainable_elements <= 0:
            found.append("it has no trainable parameters")
        return found


def without_wrappers(manifest: Manifest) -> Manifest:
    """The manifest without the prefixes of DDP (on the model) and torch.compile (on its parts).

    State dicts of wrapped models have these prefixes, and so do manifests made from them.
    """
    names = [name for entry in manifest.entries for name in (entry.name, *entry.aliases)]
    is_in_ddp = all(name.replace(COMPILED, "").startswith(IN_DDP) for name in names)

    def bare(name: str) -> str:
        plain = name.replace(COMPILED, "")
        return plain.removeprefix(IN_DDP) if is_in_ddp else plain

    return Manifest(
        tuple(
            replace(each, name=bare(each.name), aliases=tuple(map(bare, each.aliases)))
            for each in manifest.entries
        )
    )


def differences(ours: Manifest, theirs: Manifest) -> list[str]:
    """The differences of two manifests, one clause each ("it lacks ..."); empty if they are equal."""
    mine = {entry.name: entry for entry in ours.entries}
    other = {entry.name: entry for entry in theirs.entries}
    found = [f"it lacks {mine[name]}" for name in mine if name not in other]
    found += [f"it has an extra {other[name]}" for name in other if name not in mine]
    for name, entry in mine.items():
        if name in other and other[name] != entry:
            found.append(f"{name} is {_aspects(other[name], entry)}")
    if not found:
        for position, (a, b) in enumerate(zip(ours.entries, theirs.entries, strict=True)):
            if a.name != b.name:
                found.append(f"the order differs from position {position}: {b.name} for {a.name}")
                break
    return found


def summarise(clauses: Sequence[str]) -> str:
    """The first few clauses in one line, and the number of the others."""
    named = "; ".join(clauses[:DIFFERENCES_NAMED])
    more = len(clauses) - DIFFERENCES_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def _aspects(theirs: TensorEntry, ours: TensorEntry) -> str:
    pairs = [
        ("shaped ", list(theirs.shape), list(ours.shape)),
        ("", theirs.dtype, ours.dtype),
        ("", theirs.kind.value, ours.kind.value),
        ("tied to ", list(theirs.aliases), list(ours.aliases)),
    ]
    return ", ".join(f"{how}{a} instead of {b}" for how, a, b in pairs if a != b)
