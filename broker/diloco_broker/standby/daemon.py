"""The public face of a standby: it follows its hub, and becomes a `Broker` when it takes over."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import AUTO
from diloco_broker.shell.broker import ITS_PROGRAM, Broker, Service
from diloco_broker.standby.core import TakeOver
from diloco_broker.standby.following import Following
from diloco_broker.standby.link import HubLink
from diloco_broker.standby.mirror import Mirror
from diloco_broker.storage import checkpoint, resume
from diloco_broker.storage.checkpoint import Damaged
from diloco_broker.storage.standby_file import (
    new_standby,
    read_standby,
    write_standby,
)
from diloco_protocol.addresses import with_scheme
from diloco_protocol.clients.address_file import leads_somewhere, wrong_address
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Promise

logger = logging.getLogger("diloco.standby")

# Between two words to the hub that was replaced, which may be started again at any time.
TELL_S = 1.0
# Options that do not belong to the run: each broker has its own.
OF_A_PLACE = frozenset(
    {
        "bind", "feed", "keys", "ipc", "insecure", "save_dir", "keep", "audit", "resume", "fresh",
        "recover", "recover_wait", "tensor_threads", "max_workers", "max_parameters", "standby", "lease",
    }
)  # fmt: skip


def differences(hub: Mapping[str, Any], ours: BrokerConfig) -> list[str]:
    """A sentence for each option of the run that a standby was not given as its hub was.

    `hub` has the hub's options as its checkpoints have them.
    """
    found = []
    for each in fields(ours):
        name, value = each.name, getattr(ours, each.name)
        if name in OF_A_PLACE or name not in hub or hub[name] == value:
            continue
        option = f"--{name.replace('_', '-')}"
        found.append(
            f"The hub was started with {option} {hub[name]}, this standby with {value}: it would go on "
            "with its own. Start it again with the hub's."
        )
    return found


class StandbyBroker(Service):
    """A standby: `run()` it in this thread, or `start()` and `stop()` it in one of its own.

    The sockets are bound when it is made, so `address` and `feed_address` are known at once. They stay
    the same when it takes over. One that has taken over before is the hub from the start on.

    Args:
        config: the options of the broker that it may become: those of the hub, but for addresses, keys
            and `save_dir`, which it needs: there it keeps the hub's checkpoints.
        hub: the hub's control address.
        keys: those that the hub asks for, of an operator.

    Raises:
        UsageError: an address cannot be bound, there is no `save_dir`, something else saves there, or
            the options begin a run or resume another one.
    """

    thread_name = "diloco-standby"
    stops_within_s = 90.0

    def __init__(self, config: BrokerConfig, hub: str, *, keys: Keys | None = None) -> None:
        if config.save_dir is None:
            raise UsageError(
                "A standby keeps the hub's checkpoints; give it a folder: --save-dir DIR."
            )
        for name, usual in (("fresh", False), ("resume", AUTO)):
            if (given := getattr(config, name)) != usual:
                raise UsageError(
                    f"A standby continues the hub's run; leave out {name} (it is {given})."
                )
        self.hub = with_scheme(hub)
        if not leads_somewhere(self.hub):
            raise wrong_address("--of", hub)
        self._keys, self._folder = keys, Path(config.save_dir)
        self._record = read_standby(self._folder) or new_standby()
        self._following: Following | None = None
        self._broker: Broker | None = None
        self._mirror: Mirror | None = None
        self._stop: tuple[str, bool] | None = (
            None  # why it was asked to stop, and whether to come back
        )
        self._has_compared = False  # with the hub's options
        self._tried: Path | None = None  # the copy with which the options were tried
        self._misfit: str | None = None  # why a broker could not go on from it
        self._unwritten = ""  # what was said last of a takeover that could not be written down
        self._has_changed = threading.Lock()
        # It has no standby of its own before it is started again with --standby.
        self.config = replace(config, standby=False)
        if self._record.term is not None:
            self._broker = Broker(self.config, term=self._record.term)
            self.address, self.feed_address = self._broker.address, self._broker.feed_address
            return
        self._mirror = Mirror(self.hub, self._folder, keys=keys, keep=config.keep)
        try:
            write_standby(self._folder, self._record)
            self._following = Following(
                self.config,
                self.hub,
                self._record.name,
                saved=self._saved,
                misfit=self._misfit_now,
                writes_down=self._writes_down,
                keys=keys,
            )
        except OSError as error:
            self._mirror.close()
            raise UsageError(f"{self._folder} cannot be written: {error.strerror}.") from None
        except UsageError:
            self._mirror.close()
            raise
        sockets = self._following.sockets
        self.address, self.feed_address = sockets.address, sockets.feed_address
        self.config = replace(self.config, bind=self.address, feed=self.feed_address)

    def _saved(self) -> int | None:
        """The number of the newest checkpoint that is here."""
        newest = self._mirror.newest if self._mirror is not None else None
        if newest is None:
            return None
        if not self._has_compared:
            self._has_compared = True
            self._compare(newest)
        return int(newest.name.rpartition("-")[2])

    def _misfit_now(self) -> str | None:
        """Why this standby could not go on from the newest copy with its options."""
        newest = self._mirror.newest if self._mirror is not None else None
        if newest is None or newest == self._tried:
            return self._misfit
        before, self._misfit = self._misfit, None
        try:
            resume.check_options(self.config, newest)
        except UsageError as error:
            self._misfit = str(error).replace(", or --resume none to begin a new run", "")
        except (Damaged, OSError):
            return self._misfit  # another copy comes
        self._tried = newest
        if self._misfit is not None and self._misfit != before:
            logger.error("This standby cannot take over: %s", self._misfit)
        return self._misfit

    def _writes_down(self, command: TakeOver) -> bool:
        """Before anybody is let in: it must know. False where the disk does not take it."""
        record = replace(self._record, term=max(command.term, self._term_of_copy() + 1))
        try:
            write_standby(self._folder, record)
        except OSError as error:
            text = f"{self._folder} cannot be written: {error.strerror or error}."
            if text != self._unwritten:
                self._unwritten = text
                logger.error("This standby cannot take over, and tries again: %s", text)
            return False
        self._record = record
        return True

    def _compare(self, copy: Path) -> None:
        """Say in which options this standby would go on otherwise than the hub, in time to mend it."""
        with contextlib.suppress(Damaged, KeyError, TypeError, ValueError):
            theirs = dict(checkpoint.read_manifest(copy)["config"])
            for text in differences(theirs, self.config):
                logger.warning("%s", text)

    @property
    def is_hub(self) -> bool:
        """Has it taken over?"""
        return self._broker is not None

    @property
    def run_is_over(self) -> bool:
        return self._broker is not None and self._broker.run_is_over

    @property
    def is_complete(self) -> bool:
        return self._broker is not None and self._broker.is_complete

    def run(self) -> None:
        try:
            broker = self._broker or self._follow()
            if broker is not None:
                self._serve(broker)
        finally:
            self.close()

    def _follow(self) -> Broker | None:
        following, mirror = self._following, self._mirror
        assert following is not None and mirror is not None
        mirror.start()
        takes_over = following.run()
        following.close()
        mirror.close()
        if takes_over is None:
            return None
        return self._taken_over(takes_over)

    def _taken_over(self, command: TakeOver) -> Broker | None:
        term = self._record.term
        assert term is not None
        logger.warning("This standby takes over, with term %d. %s", term, command.why)
        try:
            broker = Broker(self.config, term=term)
        except Exception:
            # Nobody was let in, so it has not taken over: the next start may do it.
            with contextlib.suppress(OSError):
                write_standby(self._folder, replace(self._record, term=None))
            raise
        with self._has_changed:
            self._broker = broker
            if self._stop is not None:
                broker.request_stop(self._stop[0], restarting=self._stop[1])
        return broker

    def _term_of_copy(self) -> int:
        """The hub's term as its newest checkpoint here has it."""
        for path in checkpoint.found(self._folder)[:1]:
            with contextlib.suppress(Damaged, KeyError, TypeError, ValueError):
                return int(checkpoint.read_manifest(path).get("term", 0))
        return 0

    def _serve(self, broker: Broker) -> None:
        is_over = threading.Event()
        tells = threading.Thread(
            target=self._tell_the_hub, args=(is_over,), name="diloco-standby", daemon=True
        )
        tells.start()
        try:
            broker.run()
        finally:
            is_over.set()
            tells.join()

    def _tell_the_hub(self, is_over: threading.Event) -> None:
        """The hub that was replaced hears so whenever it can be reached."""
        record = self._record
        said = Promise(record.name, 1, wants="over", term=record.term or 0)
        link = HubLink(self.hub, self._keys)
        try:
            while not is_over.wait(TELL_S):
                link.say(said)
                for _ in link.heard():
                    pass
                link.broke()
        finally:
            link.close()

    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        self._stop = self._stop or (reason, restarting)
        if self._following is not None:
            self._following.request_stop()
        if self._broker is not None:
            self._broker.request_stop(reason, restarting=restarting)

    def close(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.close()
        if self._mirror is not None:
            self._mirror.close()
        if self._broker is not None:
            self._broker.close()
