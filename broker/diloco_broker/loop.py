"""The one thread of the broker: it receives, feeds the core, and carries out what the core asks for.

A turn takes in what the sockets have, then does tensor work (folds, steps, placements, one chunk each)
for a few milliseconds, then looks at the clock. Nothing else in the process touches the state, so there
is no lock. There is no decision about rounds in here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import zmq
from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core import Core
from diloco_broker.events import (
    DropPlaces,
    Event,
    Fold,
    Folded,
    FoldRefused,
    Inspect,
    Inspected,
    InspectRefused,
    Log,
    Malformed,
    Merge,
    PeerGone,
    Place,
    Placed,
    PlaceRefused,
    Received,
    Send,
    Step,
    Stepped,
    Stop,
    Tick,
    Work,
)
from diloco_broker.feed import TOPIC, EventLog, LoopFigures, snapshot
from diloco_broker.model_file import check_state_dict, describe
from diloco_broker.outer import make_outer
from diloco_broker.parameters import Parameters
from diloco_broker.torch_outer import OuterOptimizerFactory
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.frames import MAX_FRAME_BYTES, MAX_FRAMES, pack, unpack
from diloco_protocol.messages import Control, Notice, Result

logger = logging.getLogger("diloco.broker")

# Messages taken in before tensor work gets its turn.
MESSAGES_A_TURN = 256
# Tensor work in one turn; heartbeats are answered in between.
WORK_SLICE_S = 0.002
TICK_S = 0.1
FEED_EVERY_S = 1.0
# How long a stop may take: to finish a closing round, and to get the last messages out.
STOP_WITHIN_S = 8.0
LINGER_MS = 1000


class Broker:
    """A DiLoCo broker: `run()` it in this thread, or `start()` and `stop()` it in one of its own.

    The sockets are bound when it is made, so `address` and `feed_address` are known at once.

    Args:
        config: its options.
        initial: a state dict to begin with; without one the first worker provides the parameters.
        outer_optimizer_factory: makes the outer optimizer of a fragment, any of `torch.optim`, from
            its parameters (`FragmentParameters`). It is called once for each fragment. Such an
            optimizer steps whole tensors, so a turn of the loop takes as long as its step.

    Raises:
        UsageError: when an address cannot be bound, `initial` is no state dict, or the options
            leave no place for an optimizer of one's own.
    """

    def __init__(
        self,
        config: BrokerConfig,
        initial: Mapping[str, Tensor] | None = None,
        *,
        outer_optimizer_factory: OuterOptimizerFactory | None = None,
    ) -> None:
        self.config = config
        self._outer = make_outer(config, outer_optimizer_factory)
        self._initial = None if initial is None else check_state_dict(initial, "initial")
        self._context = zmq.Context()
        try:
            self._router = _bind(self._context, zmq.ROUTER, config.bind, "bind")
            self._pub = _bind(self._context, zmq.PUB, config.feed, "feed")
        except UsageError:
            self._context.destroy(linger=0)
            raise
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self.feed_address = self._pub.get_string(zmq.LAST_ENDPOINT)
        self._core = Core(
            config, lambda: secrets.randbits(64), time.monotonic(), describe(self._initial)
        )
        self._core.state.feed_address = self.feed_address
        self._core.state.has_own_optimizer = outer_optimizer_factory is not None
        self._failure: Exception | None = None
        self._parameters: Parameters | None = None
        self._work: deque[Work] = deque()
        self._events = EventLog()
        self._stop_reason: str | None = None
        self._thread: threading.Thread | None = None
        self._sequence = 0
        self._next_tick = self._next_feed = 0.0
        self._longest_turn_s = 0.0
        self._is_closed = False

    # Life.

    def run(self) -> None:
        """Serve until `request_stop()` is called, from a signal handler or another thread."""
        threads = torch.get_num_threads()
        # With more threads a chunk's addition spends its time waking them: 7 times slower.
        torch.set_num_threads(1)
        try:
            while not self._core.may_end():
                if self._stop_reason and self._core.state.stopping is None:
                    self._feed_core(Stop(self._stop_reason))
                    deadline = time.monotonic() + STOP_WITHIN_S
                if self._core.state.stopping and time.monotonic() > deadline:
                    logger.warning("The closing round could not be finished in time.")
                    break
                self._turn()
            self._publish(time.monotonic())
        except Exception as error:
            self._failure = error
            self._say_goodbye(error)
            raise
        finally:
            torch.set_num_threads(threads)
            self.close()

    def _say_goodbye(self, error: Exception) -> None:
        """Nothing can go on after this: the log and the workers are told why."""
        logger.critical("The broker ends because of an error: %s", error)
        for member in self._core.state.members:
            text = f"The broker ended because of an error: {error!r:.500}"
            self._send(Send(member.control, Notice("shutdown", text)))

    def start(self) -> Broker:
        """Serve in a background thread; returns the broker itself."""
        self._thread = threading.Thread(target=self._serve, name="diloco-broker", daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        with contextlib.suppress(Exception):  # `stop` raises it where somebody can catch it
            self.run()

    def request_stop(self, reason: str = "it was asked to") -> None:
        """Ask `run()` to end in an orderly way; returns at once, fit for a signal handler."""
        self._stop_reason = self._stop_reason or reason

    def stop(self) -> None:
        """End in an orderly way: finish a closing round, tell the workers, close the sockets.

        Waits for the thread of `start()`. May be called more than once.

        Raises:
            Exception: what that thread has ended with, once, if it was an error.
        """
        self.request_stop()
        if self._thread is not None:
            self._thread.join(STOP_WITHIN_S + 2 * LINGER_MS / 1000)
        else:
            self.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close the sockets. `run()` does it; needed only for a broker that never ran."""
        if not self._is_closed:
            self._is_closed = True
            self._context.destroy(linger=LINGER_MS)

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # A turn.

    def _turn(self) -> None:
        now = time.monotonic()
        timeout_s = 0.0 if self._work else max(0.0, min(self._next_tick, self._next_feed) - now)
        if self._router.poll(int(timeout_s * 1000) + (timeout_s > 0), zmq.POLLIN):
            began = time.thread_time()
            self._receive()
        else:
            began = time.thread_time()
        until = time.perf_counter() + WORK_SLICE_S
        while self._work and time.perf_counter() < until:
            for event in self._carry_out(self._work.popleft()):
                self._feed_core(event)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._feed_core(Tick())
        if now >= self._next_feed:
            self._next_feed = now + FEED_EVERY_S
            self._publish(now)
        self._longest_turn_s = max(self._longest_turn_s, time.thread_time() - began)

    def _receive(self) -> None:
        """Take in what is there, for as long as one slice of work may last."""
        until = time.perf_counter() + WORK_SLICE_S
        for _ in range(MESSAGES_A_TURN):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(route.bytes, [frame.buffer for frame in frames[: MAX_FRAMES + 1]])
            if time.perf_counter() > until:
                return

    def _take(self, route: bytes, frames: list[Any]) -> None:
        """One message. Whatever is wrong with it, it costs its sender an error, never the broker."""
        try:
            message, payload = unpack(frames)
            if isinstance(message, Control) and message.action == "status":
                self._answer_status(route, message)
            else:
                self._feed_core(Received(route, message, payload))
        except ProtocolError as error:
            self._feed_core(Malformed(route, error.code, str(error)))
        except Exception:
            logger.exception("A message could not be handled; its sender is told, the run goes on.")
            text = "The broker could not handle this message; its log has more."
            self._feed_core(Malformed(route, Code.BAD_HEADER, text))

    def _feed_core(self, event: Event) -> None:
        """Hand an event to the core and carry out what follows; tensor work is queued."""
        pending: deque[Event] = deque([event])
        while pending:
            now = time.monotonic()
            for effect in self._core.handle(pending.popleft(), now):
                match effect:
                    case Send():
                        if not self._send(effect):
                            pending.append(PeerGone(effect.route))
                    case Log():
                        logger.log(logging.getLevelName(effect.level.upper()), effect.text)
                        if effect.level != "debug":
                            self._events.add(effect, now)
                    case Fold() | Step() | Inspect() | Merge() | Place():
                        self._work.append(effect)
                    case DropPlaces():
                        kept = (work for work in self._work if not isinstance(work, Place))
                        self._work = deque(kept)

    def _send(self, effect: Send) -> bool:
        """False when the connection does not exist any more."""
        frames = pack(effect.message, effect.payload)
        try:
            self._router.send(effect.route, zmq.SNDMORE | zmq.NOBLOCK)
            for frame in frames[:-1]:
                self._router.send(frame, zmq.SNDMORE)
            # Chunks are never written again, so they are sent from where they lie.
            self._router.send(frames[-1], copy=effect.payload is None)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def _carry_out(self, work: Work) -> list[Event]:
        """One piece of tensor work; of whole-tensor steps only the last chunk has results: all."""
        tensors = self._tensors()
        match work:
            case Fold(fragment, index, _, _, weight, payload):
                is_in = tensors.fold(fragment, index, payload, weight)
                return [Folded(work) if is_in else FoldRefused(work)]
            case Inspect(fragment, index, _, _, dtype, payload):
                squares = tensors.inspect(fragment, index, payload, dtype)
                return [InspectRefused(work) if squares is None else Inspected(work, squares)]
            case Step(fragment, index, weight, count):
                done = tensors.step(fragment, index, weight, count)
                return [Stepped(fragment, each.index, each.wire, each.overflow) for each in done]
            case Merge(fragment, index, groups, count):
                done = tensors.merge(fragment, index, groups, count)
                return [Stepped(fragment, each.index, each.wire, each.overflow) for each in done]
            case Place(fragment, index, payload):
                wire = tensors.place(fragment, index, payload)
                return [PlaceRefused(work) if wire is None else Placed(work, wire)]

    def _tensors(self) -> Parameters:
        """The tensors of the run's model; anew where another model took its place before the start."""
        layout = self._core.state.bootstrap.layout
        assert layout is not None
        if self._parameters is None or self._parameters.layout is not layout:
            config = self.config
            self._parameters = Parameters(
                layout,
                self._outer,
                wire=config.wire_dtype,
                reply=config.reply_dtype,
                aggregate=config.aggregate,
                share=1 / config.workers if config.is_async else 1.0,
                is_round=not config.is_async,
                initial=self._initial,
            )
        return self._parameters

    # Showing itself.

    def _answer_status(self, route: bytes, control: Control) -> None:
        data = self._snapshot(time.monotonic())
        text = f"Round {data['round']['number']}, {data['counts']['alive']} workers alive."
        self._send(Send(route, Result(control.request, True, text, data)))

    def _publish(self, now: float) -> None:
        self._sequence += 1
        line = json.dumps(self._snapshot(now), allow_nan=False)
        self._pub.send(TOPIC + line.encode())
        if self._initial is not None and self._core.state.bootstrap.is_done:
            # The run has its own copy now.
            self._initial = None
            self._tensors().forget_initial()
        self._longest_turn_s = 0.0

    def _snapshot(self, now: float) -> dict[str, Any]:
        figures = LoopFigures(self.address, self._longest_turn_s, time.thread_time(), _rss_bytes())
        return snapshot(self._core.state, self._events, figures, self._sequence, now)


def _bind(context: zmq.Context[Any], kind: int, address: str, option: str) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = LINGER_MS
    if kind == zmq.ROUTER:
        # Without it a message to a peer that is gone or full is dropped in silence.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    try:
        scheme, _, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host  # ZeroMQ resolves no names to bind to
        socket.ipv6 = host.startswith("[")
        socket.bind(f"{scheme}://{host}:{'*' if port == '0' else port}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            why = "something else listens there; stop it or choose another port (* picks one)"
        else:
            why = str(error)
        raise UsageError(f"--{option} {address} cannot be bound: {why}.") from None
    return socket


def _rss_bytes() -> int:
    """Memory of this process now; its peak where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
