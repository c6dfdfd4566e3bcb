"""The other ranks of a simulated worker: each has a data connection, and keeps the chunks it receives.

Commands of the leader and reports to it take a while each way, as between machines. The ranks keep the
chunks of a version until the leader says that it is complete: then each must have all of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_protocol.messages import Chunk, Credit, Lane, Message, Push
from diloco_protocol.version import VersionId
from diloco_worker.session import events
from diloco_worker.session.connection import Owners
from diloco_worker.session.downloads import CREDIT_BATCH
from diloco_worker.session.effects import SendChunk
from simulation.fragments import Fragments
from simulation.network import Connection, Listener, World
from simulation.tensors import Code, Codes, Violation

if TYPE_CHECKING:
    from simulation.worker import Worker

# Longest time between two processes of one worker.
BETWEEN_PROCESSES_S = 0.02


class Lanes:
    """The session's `diloco_worker.transport.executor.Others`."""

    def __init__(
        self, worker: Worker, count: int, connect: Callable[[Worker, Listener], Connection]
    ) -> None:
        self._worker = worker
        self._world: World = worker.world
        self._connect = connect
        self.count = count
        self.connections: dict[int, Connection] = {}
        self._sessions: dict[int, bytes] = {}
        self._owed: dict[int, int] = {}
        self._kept: dict[tuple[int, VersionId], dict[int, Any]] = {}
        self._told_at = dict.fromkeys(range(count), 0.0)
        self._tells_at = dict.fromkeys(range(count), 0.0)

    def owners(self) -> Owners | None:
        """Who has which chunk, once the model is known: each every k-th."""
        layout = self._worker.session.layout
        if layout is None:
            return None
        return tuple(tuple(i % self.count for i in range(part.chunks)) for part in layout.all)

    # Commands of the leader.

    def open(
        self, address: str, bindings: tuple[Lane, ...], reply_dtype: str, shortcut: str
    ) -> None:
        for binding in bindings:
            self._is_told(binding.index, partial(self._open, binding))

    def _open(self, binding: Lane) -> None:
        lane = binding.index
        if self._worker.session.connection.live_token != binding.session:
            return  # there is another connection meanwhile
        self.connections[lane] = self._connect(self._worker, self._hears)
        self._sessions[lane], self._owed[lane] = binding.session, 0
        self.connections[lane].up(binding)

    def send(self, effect: SendChunk) -> None:
        lane, push_id, fragment, index = effect.lane, effect.push_id, effect.fragment, effect.index
        connection = self.connections.get(lane)
        chunk = Chunk(fragment, index, session=effect.session, push_id=push_id)
        payload = self._worker.payload_of(push_id, fragment, index)

        def send() -> None:
            # One that was opened meanwhile is told later, and a chunk of before is none of its own.
            now = self.connections.get(lane)
            if now is not None and (connection is None or now is connection):
                now.up(chunk, payload)

        self._is_told(lane, send)

    def seed(self, push: Push) -> None:
        """Its chunks are made when they are sent."""

    def over(self, push_id: int) -> None:
        pass

    def close(self) -> None:
        """All of them open new connections later."""
        for connection in self.connections.values():
            connection.hang_up()
        self.connections.clear()

    def hand_over(self, fragment: int, version: VersionId, memory: Fragments) -> None:
        """The leader has a complete version: chunks that it does not have are with the others."""
        owners = self.owners()
        assert owners is not None
        kept = self._kept.get((fragment, version), {})
        for index, owner in enumerate(owners[fragment]):
            if owner and index not in kept:
                raise Violation(f"process {owner} has not chunk {index} of version {version}")
            if owner and isinstance(kept[index], Code | Codes):
                memory.follow(fragment, index, kept[index], "", ())
            elif owner:
                memory.store(fragment, index, kept[index], "")
        for key in [each for each in self._kept if each[0] == fragment]:
            if (fragment, version) in self._kept:  # what came before it, and itself
                del self._kept[key]

    # Messages to the ranks.

    def _hears(self, connection: Connection, message: Message, payload: Any) -> None:
        lane = next((i for i, each in self.connections.items() if each is connection), None)
        if lane is None:
            return
        if not isinstance(message, Chunk):
            self.breaks(connection)
            return
        assert message.version is not None
        self._owed[lane] += 1
        if self._owed[lane] == CREDIT_BATCH:
            connection.up(Credit(CREDIT_BATCH, self._sessions[lane]))
            self._owed[lane] = 0
        self._kept.setdefault((message.fragment, message.version), {})[message.index] = payload
        self._tells(lane, connection, events.ArrivedElsewhere(message))

    def breaks(self, connection: Connection) -> None:
        """A process finds out that its connection broke."""
        for lane, each in self.connections.items():
            if each is connection:
                self._tells(lane, connection, events.Disconnected("A lane broke."))

    def _is_told(self, lane: int, action: Callable[[], None]) -> None:
        between = self._world.dice.uniform(0, BETWEEN_PROCESSES_S)
        at = self._told_at[lane] = max(self._told_at[lane], self._world.now + between)
        self._world.at(at, lambda: action() if self._worker.is_alive else None)

    def _tells(self, lane: int, connection: Connection, event: events.Event) -> None:
        between = self._world.dice.uniform(0, BETWEEN_PROCESSES_S)
        at = self._tells_at[lane] = max(self._tells_at[lane], self._world.now + between)

        def tell() -> None:
            if self.connections.get(lane) is connection:  # else it is of a connection before
                self._worker.is_told(event)

        self._world.at(at, tell)
