"""The broker's main loop: receives messages, feeds the core, and does the requested tensor work.

A turn takes in what the sockets have, then does tensor work (folds, steps, placements, one chunk each)
for about a millisecond, then looks at the clock. Nothing else in the process touches the state, so it
needs no lock. No decision about rounds is made in here.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.effects import Send
from diloco_broker.core.machine import Core
from diloco_broker.core.operations.status import LoopFigures
from diloco_broker.core.tape import Draws
from diloco_broker.core.versions import checkpoints
from diloco_broker.shell import relays
from diloco_broker.shell.effects import Executor
from diloco_broker.shell.onlookers import Onlookers
from diloco_broker.shell.process_memory import give_back_freed_memory, memory_bytes, rss_bytes
from diloco_broker.shell.receive_queue import ReceiveQueue
from diloco_broker.shell.relays import RelayLines
from diloco_broker.shell.served_time import ServedTime
from diloco_broker.shell.sockets import UNREAD_KEPT, Incoming, Sockets
from diloco_broker.shell.tensor_work.executor import TensorExecutor
from diloco_broker.storage import checkpoint, model_file, own_plan, resume, writer
from diloco_broker.storage.folder_lock import FolderLock
from diloco_broker.storage.key_folder import KeyFolder
from diloco_broker.storage.pieces import PieceReader
from diloco_broker.storage.tape_file import TapeWriter
from diloco_broker.tensors import memory
from diloco_broker.tensors.outer.make import make_outer
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_protocol import feed
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.fragments import Choose
from diloco_protocol.frames import unpack
from diloco_protocol.messages import Control, Heartbeat, Message, Notice, Result, encode
from diloco_protocol.relays import Piece, piece_of

logger = logging.getLogger("diloco.broker")
VERSION = version("diloco-broker")

# Messages received in one turn before tensor work.
MESSAGES_A_TURN = 256
# Longest time for receiving in a turn while tensor work waits, and for peers that have not joined.
RECEIVE_SLICE_S = 0.0005
# The same while no tensor work waits: a turn has costs of its own.
IDLE_SLICE_S = 0.005
# Tensor work in one turn; heartbeats are answered in between. A turn has costs of its own.
WORK_SLICE_S = 0.001
# Chunks, also of several workers, that are acknowledged together while there is work. Most workers have
# credit for more, so a pending acknowledgement waits for a few chunks at most.
ACKNOWLEDGED_TOGETHER = 4
TICK_S = 0.1
# Rest after a turn with only heartbeats, when that has lasted for a while: waking up costs more than
# answering one. This delays a push by at most REST_S, once a round.
REST_S = 0.02
QUIET_S = 0.5
FEED_EVERY_S = 1.0
# Seconds after the last closed connection until freed memory is returned to the system.
CALM_S = 1.0
# Seconds to wait for the last checkpoint after the closing round has ended.
SAVE_WITHIN_S = 60.0
# File name of the final model of a completed run, in its checkpoint folder.
FINAL_MODEL = "final-model.safetensors"
_INSECURE = (
    "INSECURE: any peer that reaches this broker may train, steer and read. To ask for keys: "
    "diloco-broker keygen DIR, and serve --keys DIR."
)


def machine_clock() -> Callable[[], float]:
    """A monotonic clock that includes time asleep, if the system has one."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if boot_time is None else partial(time.clock_gettime, boot_time)


class Loop:
    """The main loop, and the ports of the core's effects (see `effects`).

    `initial` has the initial tensors of the model by name; `factory` and `choose` are the user's
    functions that make the outer optimizer and the split of the model. `term` is that of a standby that
    has taken over. Raises UsageError for an invalid option, after closing everything it opened.
    """

    def __init__(
        self,
        config: BrokerConfig,
        initial: Mapping[str, Tensor] | None,
        factory: OuterOptimizerFactory | None,
        choose: Choose | None,
        *,
        term: int = 0,
    ) -> None:
        self._config = config
        self.stop_reason: str | None = None  # why it was asked to stop, None while it was not
        self.is_restarting = False  # it stops for a restart
        self.is_complete = False  # the run has reached the end that its options set
        with ExitStack() as opened:
            lock = FolderLock(Path(config.save_dir)) if config.save_dir else None
            if lock is not None:
                opened.callback(lock.release)
            split = own_plan.make_split(config, choose)
            has_own = factory is not None
            found = resume.newest_checkpoint(config, has_own_optimizer=has_own, split=split)
            self._incarnation = resume.next_incarnation(config)
            self.tensors = TensorExecutor(config, make_outer(config, factory), initial, found)
            opened.callback(self.tensors.close)
            clock = machine_clock()
            self.now = ServedTime(clock)
            self.core = Core(
                config,
                Draws(secrets.token_bytes(32)),
                self.now(),
                model_file.describe(initial),
                self.tensors.resumption,
                term=term,
                moved_aside=self._runs_to_move_aside(config),
            )
            keys = KeyFolder(Path(config.keys)) if config.keys else None
            self.sockets = Sockets(
                config.bind,
                config.feed,
                keys,
                config.max_workers,
                same_host=config.ipc,
                relays=config.relays,
            )
            opened.callback(self.sockets.close)
            if config.security == feed.INSECURE:
                logger.warning(_INSECURE)
            if lock is not None and config.fresh:  # after everything that may raise UsageError
                self._set_aside(lock)
            self._writer: writer.CheckpointWriter | None = None
            self._pieces: PieceReader | None = None
            if lock is not None:
                self._pieces = PieceReader(lock.folder, self.sockets.wake)
                opened.callback(self._pieces.close, forget=True)
                self._writer = writer.CheckpointWriter(
                    lock, config.keep, self.sockets.wake, self._pieces.spared
                )
                opened.callback(self._writer.close)
            surroundings = events.Surroundings(
                feed_address=self.sockets.feed_address,
                own_address=self.sockets.own_address,
                bound=self.sockets.address,
                memory_bytes=memory_bytes(),
                has_own_optimizer=has_own,
                has_own_split=split is not None,
            )
            self.onlookers = Onlookers(
                self.core.state, self.now, self._figures, self.sockets.publish
            )
            opened.callback(self._close_onlookers)
            tape = TapeWriter(Path(config.tape), self.core, VERSION) if config.tape else None
            if tape is not None:
                opened.callback(tape.close)
            self._opened = opened.pop_all()
        self._receive_queue = ReceiveQueue(
            self.core.state.knows, self._take, self._end_unauthenticated
        )
        self._lines = RelayLines()
        self._executor = self._make_executor(surroundings, split, tape)
        self._is_finished = False  # the core has finished
        self._next_tick = self._next_feed = 0.0
        self._rests = False
        self._received_at = 0.0  # when the last turn began to receive
        self._busy_at = 0.0  # when the last message other than a heartbeat arrived
        self._packed: tuple[Message | None, bytes, Piece | None] = (None, b"", None)  # sent last
        self._calm_at = math.inf  # when to return freed memory to the system
        self._gone_before = 0  # members gone as of the last tick
        # CPU seconds of this thread: of the longest turn since the last snapshot, and in total.
        self._longest_turn_s = self._used_s = 0.0

    @staticmethod
    def _runs_to_move_aside(config: BrokerConfig) -> frozenset[str]:
        if config.save_dir is None or not config.fresh:
            return frozenset()
        return checkpoint.runs_in(Path(config.save_dir))

    @staticmethod
    def _set_aside(lock: FolderLock) -> None:
        former = lock.set_aside()
        if former is not None:
            text = "--fresh: moved the run in %s to %s; starting a new run."
            logger.warning(text, lock.folder, former)

    def _make_executor(
        self,
        surroundings: events.Surroundings,
        split: own_plan.Split | None,
        tape: TapeWriter | None,
    ) -> Executor:
        split_of = None if split is None else lambda manifest: split(manifest).numbers(manifest)
        executor = Executor(self.core, self.now.both, self, split_of, tape)
        executor.feed(surroundings)
        return executor

    # Start and stop.

    def run(self) -> None:
        """Serve until a stop is requested, and end in an orderly way."""
        self._used_s = time.thread_time()
        self.now()
        self.now.stood_still()  # time before this was not served
        try:
            while not self._is_finished:
                if self.stop_reason and self.core.state.stopping is None:
                    self._executor.feed(events.Stop(self.stop_reason, self.is_restarting))
                self._turn()
            self._await_the_last_save()
            if self.is_complete:
                self._export()
            self._publish()
        except Exception as error:
            self._say_goodbye(error)
            if self._writer is not None:  # queued checkpoints are immutable, so without the error
                self._writer.finish(SAVE_WITHIN_S)
            raise

    def request_stop(self, reason: str, *, restarting: bool) -> None:
        """Make `run` return; for any thread or signal handler. Only the first call has an effect."""
        if self.stop_reason is None:
            self.is_restarting = restarting
            self.stop_reason = reason

    @property
    def run_is_over(self) -> bool:
        """Whether it was asked to stop without a restart."""
        return self.stop_reason is not None and not self.is_restarting

    def close(self) -> None:
        """Close files and sockets. May be called more than once."""
        self._opened.close()

    def _close_onlookers(self) -> None:
        self.onlookers.close(self.stop_reason or "an error", run_is_over=self.run_is_over)

    def _say_goodbye(self, error: Exception) -> None:
        """Log a fatal error, and notify the workers."""
        logger.critical("The broker stops because of an error: %s", error)
        for member in self.core.state.members:
            # Send only the cause; the full text names other workers.
            text = f"The broker stopped because of an error: {error.__cause__ or error!r:.500}"
            self.send(Send(member.control, Notice("restarting", text)))

    # A turn.

    def _turn(self) -> None:
        has_messages = self.sockets.wait(self._may_wait_s())
        self._rests = has_messages and self._receive()
        self._report_saves()
        self._send_piece()
        self._work()
        if self._receive_queue:
            is_idle = not self.tensors and (self._rests or not has_messages)
            self._receive_queue.catch_up(self.now, RECEIVE_SLICE_S, is_idle=is_idle)
        if not self.tensors or self._executor.unacknowledged >= ACKNOWLEDGED_TOGETHER:
            self._executor.acknowledge()
        now = self.now()
        if now >= self.sockets.next_look:
            state = self.core.state
            for why in self.sockets.look(state.members.routes() | state.relays.routes(), now):
                self._executor.feed(events.ConnectionEnded(why))
                self._calm_at = now + CALM_S
        if now >= self._calm_at:
            self._calm_at = math.inf
            memory.release()
            give_back_freed_memory()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._see_changed_keys(now)
            if stood_still := self.now.stood_still():
                self._executor.feed(events.StoodStill(stood_still))
            self._executor.feed(events.Tick(self.sockets.lost_a_connection()))
            gone, before = self.core.state.members.gone, self._gone_before
            self._gone_before = gone
            if gone > before and not self.core.state.is_running:
                # The worker that left may have uploaded a part of a model.
                self._calm_at = now + CALM_S
        if now >= self._next_feed:
            self._next_feed = now + FEED_EVERY_S
            self._publish()
        # Read this clock once per turn: unlike the others it takes a system call.
        began, self._used_s = self._used_s, time.thread_time()
        self._longest_turn_s = max(self._longest_turn_s, self._used_s - began)

    def _may_wait_s(self) -> float:
        """Seconds to wait for messages, after a rest where nothing but heartbeats came lately."""
        if (
            self.tensors
            or self._receive_queue
            or (self._pieces is not None and self._pieces.results)
        ):
            return 0.0
        if self._rests and self.now() > self._busy_at + QUIET_S:
            self.sockets.rest(REST_S)
        return min(self._next_tick, self._next_feed, self.sockets.next_look) - self.now()

    def _see_changed_keys(self, now: float) -> None:
        changes = self.sockets.changed_keys(now)
        if changes is None:
            return
        for complaint in changes.complaints:
            logger.warning(complaint)
        if changes.revoked:
            self._executor.feed(events.KeysRevoked(changes.revoked))

    def _receive(self) -> bool:
        """Receive messages for one slice of time at most. Returns whether there are no more.

        ZeroMQ stops reading a connection with a full queue until half of it is received, so after that
        many messages more may be pending.
        """
        self._received_at = self.now()
        began = time.perf_counter()
        for number in range(MESSAGES_A_TURN):
            message = self.sockets.receive()
            if message is None:
                return number < UNREAD_KEPT // 2
            if message.route:
                self._receive_queue.deliver(message, self._received_at)
            took = time.perf_counter() - began
            if took > IDLE_SLICE_S or (took > RECEIVE_SLICE_S and self.tensors):
                return False
        return False

    def _end_unauthenticated(self, route: bytes, why: str) -> None:
        self.sockets.shut(route)
        self._executor.feed(events.ConnectionEnded(why))

    def _take(self, incoming: Incoming) -> None:
        """Handle one message. A failure returns an error to its sender, and never stops the broker."""
        route, peer = incoming.route, incoming.peer
        if not self.sockets.lets_in(peer):
            return
        try:
            if self.core.state.relays.on(route) is not None:
                received = relays.received(route, incoming.frames, peer)
            else:
                longest = self._receive_queue.longest_header(route, incoming.frames)
                received = events.Received(route, *unpack(incoming.frames, longest), peer)
            if isinstance(received, events.Malformed):
                self._executor.feed(received)
                return
            message = received.message
            if type(message) is not Heartbeat:
                self._busy_at = self._received_at
            if isinstance(message, Control):
                self._look_at_outer()
                if message.action == "status":
                    self._answer_status(received.route, message)
                    return
            self._executor.feed(received)
        except ProtocolError as error:
            self._executor.feed(events.Malformed(route, error.code, str(error)))
        except Exception:
            logger.exception(
                "Failed to handle a message; its sender was notified, the run continues."
            )
            text = "The broker failed to handle this message; see its log."
            self._executor.feed(events.Malformed(route, Code.BAD_HEADER, text))

    def _work(self) -> None:
        until, state = time.perf_counter() + WORK_SLICE_S, self.core.state
        takes_long = state.has_own_optimizer  # a custom optimizer may take long
        while self.tensors and time.perf_counter() < until:
            if takes_long:
                self._executor.acknowledge()
            for event in self.tensors.do_some(state.model.layout):
                self._executor.feed(event)

    def _look_at_outer(self) -> None:
        """Report changed settings of a custom outer optimizer to the core."""
        groups = self.tensors.outer_groups()
        if groups != self.core.state.outer_groups:
            self._executor.feed(events.OuterGroups(groups))

    # Ports of the core's effects.

    def send(self, send: Send) -> bool:
        """Send a message; returns False if the connection no longer exists."""
        message, header, piece = self._packed
        # Encoded once: the same chunk or heartbeat reply is sent to many workers in a row.
        if send.message is not message:
            message, header = send.message, encode(send.message)
            piece = None if send.payload is None else piece_of(message)
            self._packed = message, header, piece
        route, frames, payload = send.route, [header], send.payload
        behind = self._lines.down(send)
        if behind is not None:
            route, via, payload = behind
            frames, piece = [encode(via), header], None if payload is None else piece
        if payload is not None:
            frames.append(payload)
        return self.sockets.send(route, frames, piece)

    def disconnect(self, route: bytes) -> None:
        behind = relays.ending(route)
        if behind is None:
            self.sockets.shut(route)
        else:
            self.send(Send(*behind))

    def write(self, record: effects.Record) -> None:
        self.onlookers.write(record)

    def save(self, save: effects.Save) -> None:
        assert self._writer is not None
        tensors = self.tensors.of(self.core.state.model.layout)
        checkpoint = writer.checkpoint_of(self.core.state, tensors, save.record, self._incarnation)
        self._writer.add(checkpoint)

    def read(self, read: effects.ReadCheckpoint) -> None:
        assert self._pieces is not None
        refused = self._pieces.ask(read)
        if refused is not None:
            self.send(Send(read.route, refused))

    def _send_piece(self) -> None:
        """Send one part of a checkpoint per turn, so that other messages are sent in between."""
        if self._pieces is not None and self._pieces.results:
            route, result = self._pieces.results.popleft()
            self.send(Send(route, result))  # a peer that is gone asks again

    def end(self, end: effects.End) -> None:
        self.is_complete = end.is_complete and self.stop_reason is None
        self.request_stop(end.reason, restarting=end.restarting)

    def finish(self, save: effects.Save | None) -> None:
        self._is_finished = True
        if save is not None:
            self.save(save)

    def handled(self, event: events.Event) -> None:
        pass

    # Checkpoints.

    def _report_saves(self) -> None:
        while self._writer is not None and self._writer.results:
            self._executor.feed(self._writer.results.popleft())

    def _await_the_last_save(self) -> None:
        if self._writer is None:
            return
        if not self._writer.finish(SAVE_WITHIN_S):
            logger.error("The last checkpoint was not written within %g s.", SAVE_WITHIN_S)
        self._report_saves()
        number = self.core.state.saving.number
        if number is not None:
            logger.info("Saved the run in %s, before round %d.", self._config.save_dir, number)

    def _export(self) -> None:
        """The final model of the run, as `diloco-broker export` would write it."""
        state, folder = self.core.state, self._config.save_dir
        if folder is None:
            logger.warning("The final model is not saved (no --save-dir); only workers have it.")
        if folder is None or state.round is None:
            return
        record = checkpoints.run_record(state, state.round.number)
        tensors = self.tensors.of(state.model.layout)
        final = writer.checkpoint_of(state, tensors, record, self._incarnation)
        path = Path(folder) / FINAL_MODEL
        try:
            model_file.write_model(model_file.model_of(final), path)
        except UsageError as error:
            logger.error("Failed to export the final model: %s", error)
        else:
            logger.info("Exported the final model to %s after %d rounds.", path, record.number)

    # Status.

    def _figures(self) -> LoopFigures:
        turn_ms, cpu_s = round(self._longest_turn_s * 1e3, 3), round(time.thread_time(), 3)
        use = feed.Loop(turn_ms, cpu_s, rss_bytes())
        return LoopFigures(VERSION, self.sockets.address, use, round(time.time(), 3))

    def _answer_status(self, route: bytes, control: Control) -> None:
        data, _ = self.onlookers.snapshot()
        text = f"Round {data['round']['number']}, {data['counts']['alive']} workers alive."
        data = data | {"feed_address": self.sockets.feed_address}
        self.send(Send(route, Result(control.request, True, text, data)))

    def _publish(self) -> None:
        with self.onlookers.failures.caught("feed"):
            self._look_at_outer()
        self.onlookers.publish()
        self._lines.forget(self.core.state.relays.routes())
        if self.core.state.is_running:
            self.tensors.forget_sources()
        self._longest_turn_s = 0.0
