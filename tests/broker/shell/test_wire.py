"""The broker over real sockets, spoken to by a worker written from the specification.

Numbers are compared with a reference written from the formulas; bad input is sent raw, and a normal
round is finished after each.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core import machine
from diloco_broker.shell.sockets import Sockets
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.messages import Control
from diloco_worker import DiLoCoClient
from kit.raw_codecs import decode, encode
from kit.raw_worker import DTYPES, RawWorker, one_tensor

ELEMENTS = 50  # seven chunks of 8, the last one shorter


def a_broker(workers: int = 2, initial: Any = None, **fields: Any) -> Broker:
    fields = {"chunk_elements": 8, "wire_dtype": "fp32", "outer_lr": 0.7, **fields}
    fields = {"outer_momentum_warmup": "constant", **fields}
    config = BrokerConfig(
        workers=workers, bind="tcp://127.0.0.1:*", feed="tcp://127.0.0.1:*", **fields
    )
    return Broker(config, initial)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with a_broker() as running:
        yield running


def begins(worker: RawWorker) -> None:
    """Join as the first worker, with parameters of zero."""
    worker.join(one_tensor(ELEMENTS))
    worker.seed(torch.zeros(ELEMENTS))


def as_read(delta: Tensor, wire: str) -> Tensor:
    """What the broker makes of a delta that travels so, chunk by chunk."""
    if wire in DTYPES:
        return delta.to(DTYPES[wire]).float()
    parts = [part.tolist() for part in torch.split(delta, 8)]
    return torch.tensor([v for part in parts for v in decode(encode(part, wire), wire, len(part))])


def reference(
    theta: Tensor, deltas: list[list[Tensor]], wire: str, momentum: float, nesterov: bool
) -> list[Tensor]:
    """Synchronous DiLoCo in one process: torch.optim.SGD over the mean of what travels."""
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=nesterov)
    history = []
    for of_workers in deltas:
        travelled = [as_read(delta, wire) for delta in of_workers]
        parameter.grad = torch.stack(travelled).sum(0) / len(travelled)
        optimizer.step()
        history.append(parameter.detach().clone())
    return history


def play(
    address: str, worker_id: str, theta: Tensor, deltas: list[Tensor], donor_is_in: threading.Event
) -> list[Tensor]:
    """One worker's whole run: the global parameters after each round. w0 provides the first."""
    with RawWorker(address, worker_id) as worker:
        if worker_id != "w0":
            assert donor_is_in.wait(20)
        welcome = worker.join(one_tensor(len(theta)))
        donor_is_in.set()
        if worker_id == "w0" and welcome.get("run") is None:
            worker.seed(theta)
        got = [worker.pull(len(theta))]
        for number, delta in enumerate(deltas):
            assert worker.version is not None
            worker.push(1000 + number, delta)
            got.append(worker.pull(len(theta), after=worker.version["counter"]))
            assert [p["push_id"] for p in worker.ledger["pushes"][worker_id]][-1] == 1000 + number
        worker.send("leave", session=worker.session)
        return got


def play_all(broker: Broker, theta: Tensor, deltas: list[list[Tensor]]) -> list[list[Tensor]]:
    """What each worker of a run gets; `deltas` is what they push, round by round."""
    donor_is_in, workers = threading.Event(), range(len(deltas[0]))
    with ThreadPoolExecutor(len(workers)) as pool:
        runs = [
            pool.submit(play, broker.address, f"w{i}", theta, [of[i] for of in deltas], donor_is_in)
            for i in workers
        ]
        return [run.result(60) for run in runs]


@pytest.mark.parametrize(
    ("workers", "wire", "momentum", "nesterov"),
    [
        *((1, "fp32", 0.9, True), (3, "fp32", 0.9, True), (1, "bf16", 0.9, False)),
        *((3, "fp16", 0.0, False), (3, "int8", 0.9, True), (1, "int4", 0.9, False)),
        (3, "int4z", 0.9, True),
    ],
)
def test_rounds_equal_the_reference(
    workers: int, wire: str, momentum: float, nesterov: bool
) -> None:
    generator = torch.Generator().manual_seed(workers)
    theta = torch.randn(ELEMENTS, generator=generator)
    deltas = [
        [torch.randn(ELEMENTS, generator=generator) for _ in range(workers)] for _ in range(4)
    ]
    options = {"outer_momentum": momentum, "nesterov": nesterov, "wire_dtype": wire}
    with a_broker(workers, **options) as broker:
        histories = play_all(broker, theta, deltas)
    expected = reference(theta, deltas, wire, momentum, nesterov)
    for history in histories:
        assert torch.equal(history[0], theta)
        for got, wanted in zip(history[1:], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    for of_round in zip(*histories, strict=True):
        assert all(torch.equal(of_round[0], other) for other in of_round)
    if workers == 1 and wire == "fp32":
        assert all(torch.equal(a, b) for a, b in zip(histories[0][1:], expected, strict=True))


def finish_a_round(broker: Broker) -> None:
    """Two well-behaved workers bring the run one version further."""
    theta = torch.zeros(ELEMENTS)
    (_, got), (_, other) = play_all(broker, theta, [[torch.ones(ELEMENTS)] * 2])
    assert torch.equal(got, other)
    assert torch.isfinite(got).all()
    assert not torch.equal(got, theta)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\xff\xfe garbage"], "bad_header"),
        ([msgpack.packb({"v": 99, "kind": "join"})], "protocol_version"),
        ([msgpack.packb({"v": 1, "kind": "welcome", "session": b"", "epoch": ""})], "bad_header"),
        ([msgpack.packb({"v": 1, "kind": "chunk", "fragment": 0, "index": 0})], "bad_frames"),
        ([b"x"] * 50, "bad_frames"),
    ],
)
def test_garbage_gets_an_error(broker: Broker, frames: list[bytes], code: str) -> None:
    with RawWorker(broker.address, "vandal") as vandal:
        vandal.control.send_multipart(frames)
        assert vandal.receive("error")["code"] == code
        finish_a_round(broker)


def test_frame_over_the_limit_costs_only_its_sender_the_connection(broker: Broker) -> None:
    with RawWorker(broker.address, "vandal") as vandal:
        vandal.control.send(bytes(9 << 20))
        finish_a_round(broker)


def test_worker_that_vanishes_is_noticed_without_a_heartbeat_timeout() -> None:
    with a_broker(2, heartbeat_timeout=0.0) as broker, RawWorker(broker.address, "w0") as stays:
        begins(stays)
        stays.pull(ELEMENTS)
        with RawWorker(broker.address, "w1") as vanishes:
            vanishes.join(one_tensor(ELEMENTS))
            vanishes.pull(ELEMENTS)
            vanishes.push(2, torch.ones(ELEMENTS))
            stays.push(1, torch.ones(ELEMENTS))
            stays.pull(ELEMENTS, after=0)
        stays.push(3, torch.ones(ELEMENTS))
        stays.pull(ELEMENTS, after=1)


@pytest.mark.parametrize("initial", [{}, {"weight": 3}, {"weight": torch.tensor([float("nan")])}])
def test_initial_that_is_not_a_state_dict_is_refused(initial: Any) -> None:
    with pytest.raises(UsageError, match=r"initial (holds|has)"):
        a_broker(1, initial)


def test_port_in_use_is_one_sentence() -> None:
    with a_broker() as broker, pytest.raises(UsageError, match="--bind"):
        Broker(BrokerConfig(bind=broker.address, feed="tcp://127.0.0.1:*"))


def test_a_second_broker_at_the_same_file_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    control, feed = (f"ipc://{tmp_path / name}" for name in ("control", "feed"))
    first = Sockets(control, feed)
    try:
        with pytest.raises(UsageError, match="--bind ipc://"):
            Sockets(control, f"ipc://{tmp_path / 'other'}")
        with pytest.raises(UsageError, match="--feed ipc://"):
            Sockets(f"ipc://{tmp_path / 'other'}", feed)
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(tmp_path / "control"))
    finally:
        first.close()


def test_the_file_of_a_broker_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    for name in ("control", "feed"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / name))
        assert (tmp_path / name).is_socket()
    Sockets(f"ipc://{tmp_path / 'control'}", f"ipc://{tmp_path / 'feed'}").close()


def test_internal_error_costs_one_message(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = machine.OF_ANYBODY[Control]

    def stumble(state: Any, route: bytes, message: Control) -> Any:
        if message.request == 666:
            raise KeyError("a mistake of ours")
        return control(state, route, message)

    monkeypatch.setitem(machine.OF_ANYBODY, Control, stumble)
    with RawWorker(broker.address, "unlucky") as unlucky:
        unlucky.send("control", action="manifest", request=666)
        unlucky.receive("error")
        finish_a_round(broker)
    assert "a mistake of ours" in caplog.text and "Control" in caplog.text


@pytest.mark.parametrize("restarting", [False, True])
def test_stop_tells_the_workers_and_ends_in_time(restarting: bool) -> None:
    broker = a_broker(1).start()
    with RawWorker(broker.address, "w0") as worker:
        begins(worker)
        stopper = threading.Thread(target=lambda: broker.stop(restarting=restarting))
        stopper.start()
        while worker.receive("notice")["what"] != ("restarting" if restarting else "shutdown"):
            pass
        stopper.join(10)
        assert not stopper.is_alive()
    assert broker.run_is_over is not restarting


def test_error_that_ends_the_broker_is_told_to_workers_and_raised_by_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers train on: the run is not over."""
    broker = a_broker(1).start()

    def fails() -> None:
        raise RuntimeError("a mistake of ours")

    with RawWorker(broker.address, "w0") as worker:
        begins(worker)
        monkeypatch.setattr(broker._loop, "_turn", fails)
        while (notice := worker.receive("notice"))["what"] != "restarting":
            assert notice["what"] != "shutdown"
        assert "a mistake of ours" in notice["text"]
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        broker.stop()
    broker.stop()
    assert "a mistake of ours" in caplog.text


def test_factory_that_cannot_be_used_ends_the_broker_with_its_sentence() -> None:
    broker = Broker(
        BrokerConfig(bind="tcp://127.0.0.1:*", feed="tcp://127.0.0.1:*"),
        outer_optimizer_factory=lambda parameters: torch.optim.SGD(parameters[:1], lr=0.1),
    ).start()
    with DiLoCoClient(broker.address, timeout=3) as client, pytest.raises(Unreachable):
        client.join(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="1 of 2"):
        broker.stop()


def test_broker_that_never_ran_can_be_stopped() -> None:
    a_broker().stop()


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_broker_listens_where_it_was_told(host: str) -> None:
    config = BrokerConfig(bind=f"tcp://{host}:*", feed=f"tcp://{host}:0", chunk_elements=8)
    with Broker(config) as broker, RawWorker(broker.address, "w0") as worker:
        worker.join(one_tensor(ELEMENTS))
        worker.seed(torch.ones(ELEMENTS))
        assert worker.pull(ELEMENTS).sum() == ELEMENTS


def test_loop_rests_only_when_no_heartbeats_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand wait when it begins; with a rest after each slice of time it would be dozens."""
    rests: list[float] = []

    def rest(_: Sockets, seconds: float) -> bool:
        rests.append(seconds)
        return False

    monkeypatch.setattr("diloco_broker.shell.loop.QUIET_S", 0.0)
    monkeypatch.setattr(Sockets, "rest", rest)
    broker, beats = a_broker(), 2000
    try:
        with RawWorker(broker.address, "stranger") as stranger:
            for _ in range(beats):
                stranger.send("heartbeat", session=bytes(16), step=1)
            broker.start()
            for _ in range(beats):
                stranger.receive("rejoin")
            assert len(rests) < 20
            while not rests:  # with nothing left it does rest
                stranger.send("heartbeat", session=bytes(16), step=1)
                stranger.receive("rejoin")
    finally:
        broker.stop()
