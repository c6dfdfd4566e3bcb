"""A broker that says exactly what a test tells it to, and a training loop computed by hand."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import zmq
from torch import Tensor, nn

from diloco_protocol import (
    Counted,
    Ledger,
    ModelLayout,
    RunConfig,
    Segment,
    VersionId,
    pack,
    unpack,
)
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Credit,
    Grant,
    Join,
    Message,
    Pull,
    Push,
    Released,
    Standing,
    Welcome,
)
from diloco_protocol.tensors.codecs import encode_chunk, segment_dtype
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.session.compatibility import cut

RUN = "00000000000000aa"
PATIENCE_S = 20.0

M = TypeVar("M", bound=Message)


def version(counter: int) -> VersionId:
    return VersionId(RUN, counter, 1000 + counter)


def run_config(**changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "mode": "sync",
        "sync_every": 4,
        "wire_dtype": "fp32",
        "reply_dtype": "fp32",
        "chunk_elements": 4,
        "heartbeat_timeout": 60.0,
        "buffers": "values",
    }
    return RunConfig(**{**fields, **changes})


class ScriptedBroker:
    """A ROUTER in the test's own thread. Nothing happens on it but what the test does."""

    def __init__(self) -> None:
        self.address = "tcp://127.0.0.1:*"
        self.control = b""
        self.bulk = b""
        self.layout: ModelLayout | None = None
        self.plan: tuple[int, ...] = ()
        self.config = run_config()
        self.sessions = 0
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(self.address)
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self._heard: deque[tuple[bytes, Message, bytes]] = deque()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def restart(self) -> None:
        """All connections break; a new socket is there at the same address."""
        self.close()
        self._open()

    # Listening.

    def _receive(self, patience: float) -> bool:
        if not self._router.poll(int(patience * 1000)):
            return False
        route, *frames = self._router.recv_multipart()
        message, payload = unpack(frames)
        self._heard.append((route, message, b"" if payload is None else bytes(payload)))
        return True

    def hears(self, kind: type[M], patience: float = PATIENCE_S) -> M:
        """The next message of a kind, passing over others; fails when none comes."""
        return self.hears_from(kind, patience)[1]

    def hears_from(
        self,
        kind: type[M],
        patience: float = PATIENCE_S,
        *,
        keep: type[Message] | tuple[type[Message], ...] = (Commit, Push),
    ) -> tuple[bytes, M, bytes]:
        """Messages of a kind in `keep` that are passed over are heard later.

        A `commit` may overtake chunks, and the pushes of several fragments are under way together.
        """
        deadline = time.monotonic() + patience
        while True:
            passed_over: list[tuple[bytes, Message, bytes]] = []
            while self._heard:
                route, message, payload = self._heard.popleft()
                if isinstance(message, kind):
                    self._heard.extendleft(reversed(passed_over))
                    return route, message, payload
                if isinstance(message, keep):
                    passed_over.append((route, message, payload))
            self._heard.extend(passed_over)
            if not self._receive(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"no {kind.kind} came within {patience:g} s")

    def hears_nothing_of(self, kind: type[Message], seconds: float) -> None:
        try:
            message = self.hears(kind, seconds)
        except AssertionError:
            return
        raise AssertionError(f"heard {message}")

    # Speaking.

    def says(self, message: Message, payload: Any = None) -> None:
        route = self.bulk if isinstance(message, Chunk) else self.control
        self._router.send_multipart([route, *pack(message, payload)])

    def welcomes(self, *versions: VersionId | None, first_round: int = 0) -> Join:
        """Take in a worker on new connections."""
        self.control, join, _ = self.hears_from(Join)
        fragments = self.config.num_fragments
        assert join.manifest is not None
        if fragments > 1:
            self.plan = FragmentPlan.of(join.manifest, fragments).numbers(join.manifest)
        self.layout = cut(join.manifest, self.config, self.plan)
        self.sessions += 1
        token = self.sessions.to_bytes(16, "big")
        run = RUN if any(versions) else None
        self.says(Welcome(token, "epoch", self.config, first_round, run, versions, plan=self.plan))
        self.bulk, _, _ = self.hears_from(Credit, keep=Message)
        return join

    def serves(
        self,
        state: FlatState,
        what: VersionId,
        *counted: int,
        worker: str = "me",
        staleness: int | None = None,
    ) -> None:
        """Send a whole version that contains these pushes."""
        fragment = state.layout.fragment
        for span in state.layout.spans:
            values = state.vectors[span.segment][span.start : span.stop]
            wire = whole_dtype(self.config.reply_dtype)
            payload = bytes(encode_chunk(span, values.to(segment_dtype(span.segment, wire)), wire))
            self.says(Chunk(fragment, span.index, version=what), payload)
        ledger = Ledger({worker: tuple(Counted(push_id) for push_id in counted)})
        self.says(Released(fragment, what, ledger, staleness=staleness))

    def grants(
        self, push: Push, held: bytes | None = None, credit: int = 2, round_: int | None = None
    ) -> None:
        standing = Standing.NEW if held is None else Standing.RESUME
        self.says(Grant(push.push_id, push.fragment, standing, held, credit, round=round_))

    def puts_off(self, push: Push) -> None:
        self.says(Grant(push.push_id, push.fragment, Standing.WAIT))

    def takes_chunks(self, push: Push, count: int) -> dict[int, bytes]:
        chunks: dict[int, bytes] = {}
        while len(chunks) < count:
            _, chunk, payload = self.hears_from(Chunk)
            assert chunk.push_id == push.push_id
            assert chunk.session == self.sessions.to_bytes(16, "big")
            chunks[chunk.index] = payload
            self.says(Ack(push.push_id, push.fragment, (chunk.index,)))
        return chunks

    def takes_push(self, round_: int | None = None) -> tuple[Push, FlatState]:
        """Receive a whole push; its values, widened to fp32."""
        push = self.hears(Push)
        self.grants(push, round_=round_)
        chunks = self.takes_chunks(push, push.chunks)
        commit = self.hears(Commit)
        assert commit.push_id == push.push_id
        return push, self.decoded(push, chunks)

    def decoded(self, push: Push, chunks: Mapping[int, bytes]) -> FlatState:
        assert self.layout is not None
        state = FlatState.empty(self.layout.all[push.fragment])
        assert sorted(chunks) == list(range(push.chunks))
        for index, payload in chunks.items():
            state.store(index, memoryview(bytearray(payload)), push.wire_dtype)
        return state

    def hears_pull(self, fragment: int = 0) -> Pull:
        while True:
            pull = self.hears(Pull)
            if pull.fragment == fragment:
                return pull


class Descent:
    """A training loop of steps whose effect is known: each lowers every trainable value by 1."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model if model is not None else nn.Linear(3, 3)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1.0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()

    def values(
        self, fragment: int = 0, chunk_elements: int = 4, part: FragmentLayout | None = None
    ) -> FlatState:
        """The model as it is now: a fragment of a run without a plan, or the part given."""
        tensors = ModelTensors.of_module(self.model)
        if part is None:
            part = cut(tensors.manifest, run_config(chunk_elements=chunk_elements), ()).all[
                fragment
            ]
        return tensors.capture(part)


def first(state: FlatState) -> float:
    """The value of the parameters, which are all the same."""
    vector = state.vectors[Segment.PARAMETERS]
    assert bool((vector == vector[0]).all())
    return float(vector[0])


def changed(state: FlatState, change: Callable[[Tensor], Tensor]) -> FlatState:
    """The same layout with other values."""
    return FlatState(state.layout, {s: change(vector) for s, vector in state.vectors.items()})
