"""The fragments of a simulated worker: chunks that arrive, are held, or are sent."""

from collections.abc import Callable, Sequence

from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes
from simulation.contents import Contents
from simulation.tensors import Code, Codes, Delta, Wire, demand


class Fragments:
    """The session's `diloco_worker.transport.executor.Memory`.

    Args:
        layout_of: how a fragment is cut.
        gradient: the payload of a chunk of a pseudo-gradient, by push id, fragment and index.
    """

    def __init__(
        self, layout_of: Callable[[int], FragmentLayout], gradient: Callable[[int, int, int], Delta]
    ) -> None:
        # Chunks that came as differences, and the most versions that one of them led over.
        self.followed = self.longest = 0
        self._layout_of = layout_of
        self._gradient = gradient
        self._held: dict[int, tuple[Wire, ...]] = {}  # by fragment
        self._assembly: dict[int, dict[int, Wire]] = {}  # chunks by fragment and index
        self._seedings: dict[int, tuple[Wire, ...]] = {}  # by push id; empty: a fresh model

    def begin(self, layout: FragmentLayout) -> None:
        self._assembly[layout.fragment] = {}

    def store(self, fragment: int, index: int, payload: Wire, wire_dtype: str) -> None:
        self._assembly[fragment][index] = payload

    def follow(
        self,
        fragment: int,
        index: int,
        payload: Code | Codes,
        wire_dtype: str,
        parts: Sequence[int],
    ) -> int:
        """What is held must be what the first of them leads from, and each what the next does."""
        held = self._held[fragment][index].contents
        for code in payload.parts:
            demand(held is code.before, "chunk {} of {} follows from another one", index, fragment)
            held = code.after
        self._assembly[fragment][index] = Wire((fragment, index), held)
        self.followed += 1
        self.longest = max(self.longest, len(payload.parts))
        return 0

    def assembled(self, fragment: int) -> tuple[Wire, ...]:
        parts = self._assembly[fragment]
        return tuple(parts[index] for index in sorted(parts))

    def finish(self, fragment: int) -> tuple[Wire, ...]:
        wires = self._held[fragment] = self.assembled(fragment)
        del self._assembly[fragment]
        return wires

    def held(self, fragment: int) -> tuple[Wire, ...] | None:
        return self._held.get(fragment)

    def forget(self) -> None:
        self._held.clear()

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        self._seedings[push_id] = self._held.get(layout.fragment, ())
        return True

    def name(self, layout: FragmentLayout) -> None:
        raise NotImplementedError("simulated workers fetch what is frozen")

    def chunk(self, push_id: int, fragment: int, index: int) -> Delta | Wire:
        if push_id not in self._seedings:
            return self._gradient(push_id, fragment, index)
        held = self._seedings[push_id]
        contents = held[index].contents if held else Contents()
        nbytes = span_bytes(self._layout_of(fragment).spans[index], "fp32")
        return Wire((fragment, index), contents, nbytes)

    def drop(self, push_id: int) -> None:
        pass
