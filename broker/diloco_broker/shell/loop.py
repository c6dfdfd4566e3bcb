"""The one thread of the broker: it receives, feeds the core, and carries out what the core asks for.

A turn takes in what the sockets have, then does tensor work (folds, steps, placements, one chunk each)
for a few milliseconds, then looks at the clock. Nothing else in the process touches the state, so there
is no lock. There is no decision about rounds in here.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core.effects import (
    AggregateAndStep,
    DropInitial,
    End,
    Finish,
    Fold,
    ForgetBuffer,
    Inspect,
    Log,
    RecordAction,
    RecordRound,
    RecordVersion,
    Revert,
    RoundReport,
    Save,
    Send,
    SetOuterOptimizer,
    Step,
    StoreInitial,
)
from diloco_broker.core.events import (
    FINISH_WITHIN_S,
    Event,
    Malformed,
    PeerGone,
    Received,
    Saved,
    SaveFailed,
    StoodStill,
    Stop,
    Tick,
)
from diloco_broker.core.feed import TOPIC, EventLog, LoopFigures, snapshot_and_line
from diloco_broker.core.machine import Core
from diloco_broker.core.state.run_record import RunRecord
from diloco_broker.shell.ack_batch import Acks
from diloco_broker.shell.onlookers import Onlookers
from diloco_broker.shell.process_memory import rss_bytes
from diloco_broker.shell.served_time import ServedTime
from diloco_broker.shell.sockets import LINGER_MS, Sockets
from diloco_broker.shell.tensor_work import Workbench
from diloco_broker.storage.audit_log import AuditLog
from diloco_broker.storage.folder_lock import FolderLock
from diloco_broker.storage.history import HistoryWriter, action_line, round_line, start_line
from diloco_broker.storage.model_file import check_state_dict, describe
from diloco_broker.storage.own_plan import make_split
from diloco_broker.storage.writer import Saver, image_of, newest_image, next_life
from diloco_broker.tensors.outer.chunked import make_outer
from diloco_broker.tensors.outer.torch_optim import OuterOptimizerFactory
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.fragments.plan import Choose
from diloco_protocol.frames import MAX_FRAMES, pack, unpack
from diloco_protocol.messages import Ack, Control, Heartbeat, Notice, Result

logger = logging.getLogger("diloco.broker")

# Messages taken in before tensor work gets its turn.
MESSAGES_A_TURN = 256
# Tensor work in one turn; heartbeats are answered in between.
WORK_SLICE_S = 0.0005
# Between two looks whether there is memory for the first parameters.
MEMORY_S = 0.001
TICK_S = 0.1
# After a turn that brought nothing but heartbeats, where nothing else has come for a while. Waking up
# costs more than answering one: with hundreds of idle workers most of the time went there. A push
# meanwhile waits so long, once a round.
REST_S = 0.02
QUIET_S = 0.5
FEED_EVERY_S = 1.0
# How long the last checkpoint may take, after the closing round is finished.
SAVE_WITHIN_S = 60.0


def _machine_clock() -> Callable[[], float]:
    """A monotonic clock that goes on while the machine sleeps, where the system has one."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if boot_time is None else partial(time.clock_gettime, boot_time)


class Broker:
    """A DiLoCo broker: `run()` it in this thread, or `start()` and `stop()` it in one of its own.

    The sockets are bound when it is made, so `address` and `feed_address` are known at once.

    Args:
        config: its options.
        initial: a state dict to begin with; without one the first worker provides the parameters.
        outer_optimizer_factory: makes the outer optimizer of a fragment, any of `torch.optim`, from
            its parameters (`FragmentParameters`). It is called once for each fragment. Such an
            optimizer steps whole tensors, so a turn of the loop takes as long as its step.
        fragment_plan: splits the model instead of a pattern: returns the fragment, 0 to
            `num_fragments` - 1, of each trainable parameter by its name and shape. It is called when
            the model is known. For a split from a file see `BrokerConfig.fragment_plan`.

    Raises:
        UsageError: when an address cannot be bound, `initial` is no state dict, the options leave no
            place for an optimizer or a split of one's own, or the run in `save_dir` is split otherwise.
    """

    def __init__(
        self,
        config: BrokerConfig,
        initial: Mapping[str, Tensor] | None = None,
        *,
        outer_optimizer_factory: OuterOptimizerFactory | None = None,
        fragment_plan: Choose | None = None,
    ) -> None:
        self.config = config
        self._initial = None if initial is None else check_state_dict(initial, "initial")
        self._lock = FolderLock(Path(config.save_dir)) if config.save_dir else None
        try:
            self._set_up(outer_optimizer_factory, fragment_plan)
        except UsageError:
            if self._lock is not None:
                self._lock.release()
            raise
        self.address, self.feed_address = self._sockets.address, self._sockets.feed_address
        self._saver: Saver | None = None
        self._failure: Exception | None = None
        self._events = EventLog()
        self._onlookers = Onlookers()
        self._stop_reason: str | None = None
        self._is_restarting = False
        self._thread: threading.Thread | None = None
        self._sequence = 0
        self._next_tick = self._next_feed = 0.0
        self._rests = False
        self._stirred_at = 0.0  # when something came that was no heartbeat
        self._alive: tuple[Notice | None, list[Any]] = (None, [])
        self._acks = Acks()
        self._longest_turn_s = 0.0
        self._used_s = 0.0  # CPU of the loop's thread at the end of the last turn
        self._is_finished = False  # the core has nothing left to do
        self._is_closed = False

    def _set_up(self, factory: OuterOptimizerFactory | None, choose: Choose | None) -> None:
        config = self.config
        split = make_split(config, choose)
        image = newest_image(config, has_own_optimizer=factory is not None, split=split)
        self._life = next_life(config)
        outer = make_outer(config, factory)
        self._workbench = Workbench(config, outer, self._initial, image)
        self._clock = ServedTime(_machine_clock())
        self._core = Core(
            config,
            lambda: secrets.randbits(64),
            self._clock(),
            describe(self._initial),
            self._workbench.resumption,
        )
        state = self._core.state
        self._audit = AuditLog(Path(config.audit), state.epoch) if config.audit else None
        self._sockets = Sockets(config.bind, config.feed)
        self._history = (
            HistoryWriter(Path(config.save_dir), state.epoch) if config.save_dir else None
        )
        self._history_error: str | None = None
        self._start_line: dict[str, Any] | None = None
        state.feed_address = self._sockets.feed_address
        state.has_own_optimizer = factory is not None
        state.own_split = split

    # Life.

    def run(self) -> None:
        """Serve until `request_stop()` is called, from a signal handler or another thread."""
        threads = torch.get_num_threads()
        # With more threads a chunk's addition spends its time waking them: 7 times slower.
        torch.set_num_threads(1)
        self._used_s = time.thread_time()
        self._clock()
        self._clock.stood_still()  # what was before this was no service
        try:
            while not self._is_finished:
                if self._stop_reason and self._core.state.stopping is None:
                    self._feed_core(Stop(self._stop_reason, self._is_restarting))
                self._turn()
            self._await_the_last_save()
            self._publish(self._clock())
        except Exception as error:
            self._failure = error
            self._say_goodbye(error)
            if self._saver is not None:  # images never change, so what broke is not in them
                self._saver.finish(SAVE_WITHIN_S)
            raise
        finally:
            torch.set_num_threads(threads)
            self.close()

    def _say_goodbye(self, error: Exception) -> None:
        """Nothing can go on after this: the log and the workers are told why."""
        logger.critical("The broker ends because of an error: %s", error)
        for member in self._core.state.members:
            text = f"The broker ended because of an error: {error!r:.500}"
            self._send(Send(member.control, Notice("restarting", text)))

    def start(self) -> Broker:
        """Serve in a background thread; returns the broker itself."""
        self._thread = threading.Thread(target=self._serve, name="diloco-broker", daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        with contextlib.suppress(Exception):  # `stop` raises it where somebody can catch it
            self.run()

    @property
    def resumes(self) -> bool:
        """Does the broker go on from a checkpoint?"""
        return self._core.state.is_resumed

    @property
    def run_is_over(self) -> bool:
        """Was the broker asked to end for good, and not to come back?"""
        return self._stop_reason is not None and not self._is_restarting

    def request_stop(
        self, reason: str = "its program has ended it", *, restarting: bool = False
    ) -> None:
        """Ask `run()` to end in an orderly way; returns at once, fit for a signal handler.

        Args:
            reason: for the log and the workers, as the end of a sentence.
            restarting: a broker will be back here, so workers train on and come back to it. False: the
                run is over, which the workers' scripts see in `should_stop`. The first call counts.
        """
        if self._stop_reason is None:
            self._is_restarting = restarting
            self._stop_reason = reason or "its program has ended it"

    def stop(self, *, restarting: bool = False) -> None:
        """End in an orderly way: finish a closing round, tell the workers, close the sockets.

        Waits for the thread of `start()`. May be called more than once.

        Args:
            restarting: as in `request_stop`.

        Raises:
            Exception: what that thread has ended with, once, if it was an error.
        """
        self.request_stop(restarting=restarting)
        if self._thread is not None:
            self._thread.join(FINISH_WITHIN_S + SAVE_WITHIN_S + 2 * LINGER_MS / 1000)
        else:
            self.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close the sockets. `run()` does it; needed only for a broker that never ran."""
        if not self._is_closed:
            self._is_closed = True
            self._workbench.close()
            if self._saver is not None:
                self._saver.close()
            if self._audit is not None:
                self._audit.close()
            if self._history is not None:
                self._history.add(
                    {
                        "kind": "stop",
                        "text": self._stop_reason or "an error",
                        "run_is_over": self.run_is_over,
                    }
                )
                self._history.close()
            self._sockets.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # A turn.

    def _turn(self) -> None:
        now = self._clock()
        if self._rests and not self._workbench and now > self._stirred_at + QUIET_S:
            time.sleep(REST_S)
            now += REST_S
        timeout_s = min(self._next_tick, self._next_feed) - now
        if self._workbench:
            timeout_s = 0.0 if self._is_ready() else MEMORY_S
        has_messages = self._sockets.wait(timeout_s)
        self._rests = has_messages and self._receive()
        self._report_saves()
        until = time.perf_counter() + WORK_SLICE_S
        while self._is_ready() and time.perf_counter() < until:
            if self._core.state.has_own_optimizer:  # its step may take long
                self._feed_core(*self._acknowledge())
            for event in self._workbench.do_one(self._core.state.bootstrap.layout):
                self._feed_core(event)
        self._feed_core(*self._acknowledge())
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            if stood_still := self._clock.stood_still():
                self._feed_core(StoodStill(stood_still))
            self._feed_core(Tick(self._sockets.lost_a_connection()))
        if now >= self._next_feed:
            self._next_feed = now + FEED_EVERY_S
            self._publish(now)
        # One look at this clock a turn: it is a system call, where the others are none.
        began, self._used_s = self._used_s, time.thread_time()
        self._longest_turn_s = max(self._longest_turn_s, self._used_s - began)

    def _is_ready(self) -> bool:
        return self._workbench.is_ready(self._core.state.bootstrap.layout)

    def _receive(self) -> bool:
        """Take in what is there, for one slice of time at most. Returns whether that was all."""
        until = time.perf_counter() + WORK_SLICE_S
        for _ in range(MESSAGES_A_TURN):
            message = self._sockets.receive()
            if message is None:
                return True
            route, *frames = message
            self._take(route.bytes, [frame.buffer for frame in frames[: MAX_FRAMES + 1]])
            if time.perf_counter() > until:
                return False
        return False

    def _take(self, route: bytes, frames: list[Any]) -> None:
        """One message. Whatever is wrong with it, it costs its sender an error, never the broker."""
        try:
            message, payload = unpack(frames)
            if not isinstance(message, Heartbeat):
                self._stirred_at = self._clock()
            if isinstance(message, Control):
                self._core.state.outer_groups = self._workbench.outer_groups()
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

    def _feed_core(self, *events: Event) -> None:
        """Hand events to the core and carry out what follows; tensor work is queued."""
        pending: deque[Event] = deque(events)
        while pending:
            now = self._clock()
            for effect in self._core.handle(pending.popleft(), now):
                match effect:
                    case Send(route, Ack() as ack):
                        self._acks.add(route, ack)
                    case Send():
                        if effect.payload is None:  # chunks go over a connection of their own
                            pending += self._acknowledge()
                        if not self._send(effect):
                            pending.append(PeerGone(effect.route))
                    case Log():
                        self._tell(effect, now)
                    case RecordAction():
                        self._tell(Log("warning", f"{effect.who}: {effect.text}."), now)
                        with self._onlookers.spared("log of actions"):
                            self._write_action(effect)
                    case RecordRound(report):
                        with self._onlookers.spared("history of the round"):
                            self._write_round(report)
                    case SetOuterOptimizer(config, own):
                        self._workbench.tune(config, own)
                    case Finish(save):
                        self._is_finished = True
                        if save is not None:
                            self._save(save.record)
                    case End(reason, restarting):
                        self.request_stop(reason, restarting=restarting)
                    case Fold() | Step() | Inspect() | AggregateAndStep() | StoreInitial():
                        self._workbench.add(effect)
                    case Save():
                        self._save(effect.record)
                    case RecordVersion():
                        with self._onlookers.spared("audit"):
                            self._write_audit(effect)
                    case Revert(fragment):
                        self._workbench.revert(fragment)
                    case ForgetBuffer(fragment):
                        layout = self._core.state.bootstrap.layout
                        self._workbench.tensors(layout).forget_buffer(fragment)
                    case DropInitial():
                        self._workbench.drop_initial()

    def _acknowledge(self) -> list[Event]:
        """Let the senders of chunks know what is in by now. Returns what is to be fed of it."""
        if not self._acks:
            return []
        return [PeerGone(send.route) for send in self._acks.take() if not self._send(send)]

    def _tell(self, log: Log, now: float) -> None:
        logger.log(logging.getLevelName(log.level.upper()), log.text)
        if log.level == "debug" or not log.is_listed:
            return
        with self._onlookers.spared("history of an event"):
            self._events.add(log, now)
            if self._history is not None:
                self._history.add({"kind": "event", "level": log.level, "text": log.text})

    def _send(self, effect: Send) -> bool:
        """False when the connection does not exist any more."""
        # The answer to each heartbeat of a round is the same.
        if effect.message is not self._alive[0]:
            frames = pack(effect.message, effect.payload)
            if isinstance(effect.message, Notice):
                self._alive = effect.message, frames
        else:
            frames = self._alive[1]
        # Chunks are never written again, so they are sent from where they lie.
        return self._sockets.send(effect.route, frames, copy=effect.payload is None)

    def _write_audit(self, audit: RecordVersion) -> None:
        if self._audit is not None:
            try:
                self._audit.add(audit)
            except OSError as error:
                text = f"The audit log {self.config.audit} cannot be written: {error.strerror}."
                self._tell(Log("error", text), self._clock())

    def _write_action(self, acted: RecordAction) -> None:
        state = self._core.state
        number = state.round.number if state.round else None
        if self._history is not None:
            self._history.act(action_line(acted, state.bootstrap.run, number))

    def _write_round(self, report: RoundReport) -> None:
        if self._history is not None:
            figures = {
                "cpu_s": round(time.thread_time(), 3),
                "rss_bytes": rss_bytes(),
                "longest_turn_ms": round(self._longest_turn_s * 1e3, 3),
            }
            self._history.add(round_line(self._core.state, report, figures))

    def _look_after_history(self, snapshot: dict[str, Any]) -> None:
        """Write down what the run is when that has changed; say it when lines are lost."""
        if self._history is None:
            return
        line = start_line(snapshot)
        reducer = {**line["settings"]["reducer"], "submissions": 0, "waiting": 0}
        changing = {**line, "settings": {**line["settings"], "reducer": reducer}}
        if changing != self._start_line:
            self._start_line = changing
            self._history.add(line)
        error = self._history.error
        if error != self._history_error:
            self._history_error = error
            folder = self.config.save_dir
            text = (
                f"The history in {folder} cannot be written: {error}. Training goes on without it."
                if error
                else f"The history in {folder} is written again; {self._history.lost} lines are lost."
            )
            self._tell(Log("error" if error else "info", text), self._clock())

    # Checkpoints.

    def _save(self, record: RunRecord) -> None:
        """Hand what there is now to the helper thread."""
        if self._saver is None:
            assert self._lock is not None
            self._saver = Saver(self._lock, self.config.keep, self._sockets.wake)
        tensors = self._workbench.tensors(self._core.state.bootstrap.layout)
        self._saver.save(image_of(self._core.state, tensors, record, self._life))

    def _report_saves(self) -> None:
        while self._saver is not None and self._saver.outcomes:
            done = self._saver.outcomes.popleft()
            if done.error is None:
                self._feed_core(Saved(done.number, str(done.path)))
            else:
                self._feed_core(SaveFailed(done.number, done.error))

    def _await_the_last_save(self) -> None:
        """At an orderly end: the last checkpoint may still be being written."""
        saving = self._core.state.saving
        if self._saver is not None:
            if not self._saver.finish(SAVE_WITHIN_S):
                logger.error("The last checkpoint was not written within %g s.", SAVE_WITHIN_S)
            self._report_saves()
            if saving.number is not None:
                folder = self.config.save_dir
                logger.info("The run is saved in %s, before round %d.", folder, saving.number)

    # Showing itself.

    def _answer_status(self, route: bytes, control: Control) -> None:
        data, _ = self._snapshot(self._clock())
        text = f"Round {data['round']['number']}, {data['counts']['alive']} workers alive."
        self._send(Send(route, Result(control.request, True, text, data)))

    def _publish(self, now: float) -> None:
        self._sequence += 1
        with self._onlookers.spared("feed"):
            self._core.state.outer_groups = self._workbench.outer_groups()
            snapshot, line = self._snapshot(now)
            self._sockets.publish(TOPIC + line.encode())
            self._look_after_history(snapshot)
        if self._core.state.bootstrap.is_done:
            self._initial = None
            self._workbench.forget_sources()
        self._longest_turn_s = 0.0

    def _snapshot(self, now: float) -> tuple[dict[str, Any], str]:
        figures = LoopFigures(self.address, self._longest_turn_s, time.thread_time(), rss_bytes())
        return snapshot_and_line(self._core.state, self._events, figures, self._sequence, now)
