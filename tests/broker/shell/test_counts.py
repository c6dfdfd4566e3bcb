"""What a round costs, in counts that no busy machine can change: messages, bytes, credits, copies."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core.rounds.uploads import UPLOAD_WINDOW
from diloco_broker.tensors.outer.make import make_outer
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol import Kind, Manifest, Segment, TensorEntry, lay_out
from diloco_protocol.tensors.codecs import as_bytes, segment_dtype
from diloco_worker import DiLoCoClient
from diloco_worker.session.downloads import CREDIT_BATCH, DOWNLOAD_WINDOW
from kit.chunked_model import fold
from kit.proxy import MessageProxy, Seen
from kit.reference import state_of
from kit.whole_run import PATIENCE_S, make_config, run, trainees

PARAMETERS = 83  # of `whole_run.mlp`
CHUNK_ELEMENTS = 2
CHUNKS = 42  # more than either window
WORKERS, ROUNDS = 2, 6


class Traffic:
    """Calm rounds through a proxy that notes every message, and what the broker says of its workers."""

    def __init__(self, chunk: int = CHUNK_ELEMENTS, **options: Any) -> None:
        made = trainees(WORKERS)
        config = make_config(workers=WORKERS, sync_every=1, chunk_elements=chunk, **options)
        self.rows: dict[str, Mapping[str, Any]] = {}

        def look(hook: Any, worker: int, step: int) -> None:
            with DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
                rows = client.status()["workers"]
            self.rows |= {row["id"]: row for row in rows if row["id"] == f"w{worker}"}

        with (
            Broker(config, state_of(made[0].model)) as broker,
            MessageProxy(broker.address) as proxy,
        ):
            run(broker, made, ROUNDS, server=proxy.address, done=look)
        self.seen: list[Seen] = proxy.seen

    def count(self, *, up: bool) -> Counter[str]:
        return Counter(each.kind for each in self.seen if each.up is up)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return Traffic(wire_dtype="bf16")


@pytest.mark.slow
def test_round_takes_one_push_one_commit_and_one_release_of_each_worker(traffic: Traffic) -> None:
    up, down = traffic.count(up=True), traffic.count(up=False)
    pushes, versions = WORKERS * ROUNDS, WORKERS * (ROUNDS + 1)  # the first comes without a push
    assert up["push"] == up["commit"] == pushes
    assert down["grant"] <= 2 * pushes  # it may come before the round is open: wait, then new
    assert down["released"] == versions
    assert up["pull"] <= versions + WORKERS
    assert up["join"] == down["welcome"] == WORKERS
    assert not {"error", "rejoin"} & down.keys()


def test_each_chunk_goes_up_once_and_comes_down_once_in_a_round(traffic: Traffic) -> None:
    up, down = traffic.count(up=True), traffic.count(up=False)
    assert up["chunk"] == WORKERS * ROUNDS * CHUNKS
    assert down["chunk"] == WORKERS * (ROUNDS + 1) * CHUNKS
    assert down["ack"] <= up["chunk"]
    assert up["credit"] <= down["chunk"] // CREDIT_BATCH + 2 * WORKERS


def test_bytes_of_a_round_are_those_of_the_parameters_in_wire_dtype(traffic: Traffic) -> None:
    """Chunks alone: W b n up and W r n down, with bf16 up and fp32 down."""
    assert traffic.rows.keys() == {f"w{worker}" for worker in range(WORKERS)}
    for row in traffic.rows.values():
        assert row["bytes_up"] == ROUNDS * 2 * PARAMETERS
        assert row["bytes_down"] == (ROUNDS + 1) * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("codec", "block", "reply", "down"), [("int8", 258, "int8", 258), ("sparse", 116, "int4", 130)]
)
def test_bytes_of_a_round_quantized_are_scales_and_codes(
    codec: str, block: int, reply: str, down: int
) -> None:
    """Up each block (of 256 elements, or 4096); down the same, but for chunks that are shorter whole."""
    elements = 64
    counted = Traffic(wire_dtype=codec, reply_dtype=reply, chunk=elements)
    whole = [4 * elements, 4 * (PARAMETERS - elements)]
    for row in counted.rows.values():
        assert row["bytes_up"] == ROUNDS * len(whole) * block
        assert row["bytes_down"] == sum(whole) + ROUNDS * sum(min(down, each) for each in whole)


def test_chunks_under_way_never_exceed_their_window(traffic: Traffic) -> None:
    """The proxy notes a message before it passes it on, so what credit lets go is noted behind it."""
    most = 0
    up: Counter[int] = Counter()  # unacknowledged, by push
    bulk: dict[int, bytes] = {}  # sessions by the connection that their first credit came on
    credit: Counter[bytes] = Counter()  # not used yet, by session
    for each in traffic.seen:
        match each.kind, each.up:
            case "chunk", True:
                push = each.header["push_id"]
                up[push] += 1
                most = max(most, up[push])
            case "ack", False:
                up[each.header["push_id"]] -= len(each.header["chunks"])
            case "credit", True:
                session = each.header["session"]
                if session not in bulk.values():
                    bulk[each.connection] = session
                credit[session] += each.header["chunks"]
                assert credit[session] <= DOWNLOAD_WINDOW
            case "chunk", False:
                credit[bulk[each.connection]] -= 1
                assert credit[bulk[each.connection]] >= 0
    assert 1 < most <= UPLOAD_WINDOW


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts new tensors that are as long as a chunk."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = elements
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        places = {
            each.untyped_storage().data_ptr()
            for each in (*args, *kwargs.values())
            if isinstance(each, Tensor)
        }
        for each in result if isinstance(result, tuple) else (result,):
            is_long = isinstance(each, Tensor) and each.numel() >= self.elements
            if is_long and each.untyped_storage().data_ptr() not in places:
                self.made.append(str(func))
        return result


ELEMENTS = 1 << 16


@pytest.mark.parametrize("reply", ["fp32", "bf16"])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_fold_and_step_of_a_chunk_allocate_nothing(wire: str, reply: str) -> None:
    """Decoding, adding up, the outer step and encoding: into memory that is there already."""
    entries = (TensorEntry("w", (2 * ELEMENTS,), "float32", Kind.TRAINABLE),)
    layout = lay_out(Manifest(entries), chunk_elements=ELEMENTS)
    config = BrokerConfig()
    tensors = Parameters(
        layout, make_outer(config), wire=wire, reply=reply, initial={"w": torch.randn(2 * ELEMENTS)}
    )
    for index in range(2):
        tensors.place(0, index)
    payload = as_bytes(torch.randn(ELEMENTS).to(segment_dtype(Segment.PARAMETERS, wire)))
    for count in range(6):
        with Allocations(ELEMENTS) as allocations:
            for index in range(2):
                assert fold(tensors, 0, index, payload, 1.0) is not None
                assert fold(tensors, 0, index, payload, 1.0) is not None
                tensors.step(0, index, 2.0, count)()
        assert allocations.made == []
