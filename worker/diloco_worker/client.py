"""DiLoCoClient: a run, one call at a time, for programs that drive the training themselves.

    with DiLoCoClient("tcp://10.0.0.1:8512") as client:
        start = client.join(model)
        model.load_state_dict(start.tensors)
        ...
        client.push(pseudo_gradient)
        model.load_state_dict(client.pull().tensors)

With P fragments, `push` sends one of them: `client.push(delta, fragment=0)`. Without `join` the client
is an observer: it can `pull`, ask for the `status` and send `control` actions.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco_protocol import Code, Ledger, Manifest, ProtocolError, RunConfig, Segment, VersionId
from diloco_protocol.addresses import several
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.errors import Refused, Unreachable, UsageError
from diloco_protocol.messages import BUFFERS, Control, Heartbeat, Join, Push, Result
from diloco_protocol.records import from_plain
from diloco_protocol.roles import Role
from diloco_worker.joining import check_sendable, new_session
from diloco_worker.model.encoding import encode
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.session.compatibility import Terms, cut
from diloco_worker.session.connection import Phase
from diloco_worker.session.events import Ask, BeatNow, Observe, RequestVersion
from diloco_worker.session.news import Arrival
from diloco_worker.session.session import Session
from diloco_worker.settings import ADDRESS, check, default_worker_id, worker_keys
from diloco_worker.transport.broker_address import Given
from diloco_worker.transport.link import Link

# Seconds between two requests while the broker has no model.
ASK_AGAIN_S = 0.5


class DiLoCoClient:
    """A context manager; not for several threads at once.

    Args:
        server: the broker's address, tcp:// may be left out; several separated by commas, of which it
            uses the first that serves; or a function that returns one.
        worker_id: name in displays, unique in the run; default: host name and a random ending.
        timeout: seconds that a call waits before it raises Unreachable.
        heartbeat_interval: seconds; None = by the broker, 0 = none. Heartbeats are sent by themselves.
        wants: required fields of the run's configuration, such as {"sync_every": 100}. `wire_dtype` may
            differ from the run's; `push` uses it.
        extra: a small dict, shown in displays.

    Raises:
        UsageError: an invalid address.
    """

    def __init__(
        self,
        server: Given,
        *,
        worker_id: str | None = None,
        timeout: float = 600.0,
        heartbeat_interval: float | None = None,
        wants: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        keys: str | Path | None = None,
    ) -> None:
        check(server, ADDRESS, "server")
        self._keys, worker_id = worker_keys(keys, worker_id, Role.OPERATOR, Role.MONITOR)
        self.server = ",".join(several(server)) if isinstance(server, str) else server
        self.worker_id = worker_id or default_worker_id()
        self.timeout = timeout
        self._heartbeat_interval = heartbeat_interval
        self._wants = dict(wants or {})
        self._extra = dict(extra or {})
        self._link: Link | None = None
        self._joined = False
        self._pulled: PulledModel | None = None
        self._flights: dict[int, int] = {}  # push ids, by fragment
        self._requests = itertools.count(1)

    def __enter__(self) -> DiLoCoClient:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave("its program ended with an error" if error is not None else "")

    # Training.

    def join(
        self,
        model: nn.Module | None = None,
        *,
        manifest: Manifest | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> GlobalParameters:
        """Join the run with a module, or a manifest and its tensors. The model is only read.

        Its values seed the run if the broker has no parameters.

        Returns:
            The global parameters to start from.

        Raises:
            UsageError: joined already, or the model cannot be exchanged or start a run.
            Refused: the broker refuses this worker.
            Unreachable: no answer within the timeout.
        """
        if self._joined:
            raise UsageError("This client has joined already; leave first.")
        if model is not None:
            tensors = ModelTensors.of_module(model)
        elif manifest is not None and state is not None:
            tensors = ModelTensors.of_state(manifest, state)
        else:
            raise UsageError("join() needs a model, or a manifest and a state.")
        self.leave()
        try:
            self._join(tensors)
        except BaseException:
            self.leave("it did not start training")
            raise
        assert self._pulled is not None
        return self._pulled.parameters()

    def _join(self, tensors: ModelTensors) -> None:
        tensors.check_values()
        join = Join(self.worker_id, tensors.manifest, wants=self._wants, extra=self._extra)
        session = new_session(join, self._heartbeat_interval)
        link = self._begin(session, capture=tensors.capture)
        self._await(lambda: link.layout is not None, "joining")
        assert link.terms is not None
        self._pulled = PulledModel(tensors.manifest, link.terms, link)
        self._take_all(self._pulled, "waiting for the first parameters")
        self._joined = True

    def push(
        self,
        delta: Mapping[str, Tensor],
        weight: float = 1.0,
        *,
        fragment: int | None = None,
        steps: int = 0,
        tokens: int = 0,
        samples: int = 0,
        loss: float | None = None,
    ) -> int:
        """Send a pseudo-gradient: global parameters minus the parameters reached.

        Returns when the broker has all of it, which may be before its round closes; `pull` then waits
        for the version that contains it. In asynchronous mode this may wait for its turn. The rounding
        of a quantized wire dtype is lost: a client keeps no residual, unlike a `DiLoCoWorker`.

        Args:
            delta: by name of `state_dict`: all trainable parameters (of the fragment), in any float
                dtype, and optionally buffers. Buffers, floats and integers, are *values*, not
                differences, and default to those of the last pull. Tensors of other fragments are
                ignored.
            weight: of this contribution.
            fragment: which one to send; required where there are several. In synchronous mode every
                worker pushes them in turn. Buffers travel with the last.
            steps, tokens, samples, loss: for displays and weights.

        Returns:
            Its push id.

        Raises:
            UsageError: not joined; no such fragment; a missing, misshapen or non-finite tensor; a
                number that is too large. Nothing was sent.
            Refused: the broker dropped it.
            Unreachable: not uploaded within the timeout. It stays in flight: `pull` goes on.
        """
        pulled = self._require_joined()
        link, part = pulled.link, pulled.part(fragment)
        dtype = self._wants.get("wire_dtype") or pulled.config.wire_dtype
        frozen = encode(part, pulled.complete(part, delta), dtype)
        if frozen.bad is not None:
            raise UsageError(
                f"The pseudo-gradient is not finite in {frozen.bad} (in {dtype}); nothing was sent."
            )
        push = Push(
            session=b"",
            push_id=secrets.randbits(64),
            fragment=part.fragment,
            chunks=part.chunks,
            wire_dtype=dtype,
            base=pulled.versions[part.fragment],
            weight=float(weight),
            steps=int(steps),
            tokens=int(tokens),
            samples=int(samples),
            loss=None if loss is None else float(loss),
            norm=frozen.norm,
            buffers=BUFFERS,
        )
        check_sendable(push, "This push")
        self._flights[part.fragment] = push.push_id
        link.offer(push, frozen.wire)

        def is_in() -> bool:
            arrival = link.arrivals.get(part.fragment)
            counted = arrival is not None and push.push_id in arrival.counted
            return counted or push.push_id in link.uploaded or push.push_id in link.rejections

        self._await(is_in, "pushing")
        self._raise_rejection(link, part.fragment)
        return push.push_id

    def pull(self, after: int | None = None) -> GlobalParameters:
        """Get the newest global parameters: all fragments.

        With pushes in flight, waits for the versions that contain them.

        Args:
            after: wait for a version (of fragment 0) whose counter is above this.

        Raises:
            Refused: the push in flight was dropped, or the broker has no model.
            Unreachable: there was none within the timeout.
        """
        if self._pulled is None:
            self._observe()
        pulled = self._pulled
        assert pulled is not None
        if not pulled.versions:
            self._take_all(pulled, "waiting for parameters")
        else:
            in_flight = list(self._flights)
            for fragment in in_flight:
                pulled.take(self._await_flight(pulled.link, fragment))
            trained = [part.fragment for part in pulled.layout.fragments]
            self._take_newest(pulled, [f for f in trained if f not in in_flight], after)
        while after is not None and pulled.versions[0].counter <= after:
            self._take_newest(pulled, [0], after)
        return pulled.parameters()

    def heartbeat(
        self,
        step: int,
        *,
        inner_step: int = 0,
        steps_per_s: float | None = None,
        loss: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Report the state of training: now, and in the automatic heartbeats.

        Raises:
            UsageError: not joined, or a number that is too large.
        """
        link = self._require_joined().link
        progress = Heartbeat(
            session=b"",
            step=int(step),
            inner_step=int(inner_step),
            steps_per_s=None if steps_per_s is None else float(steps_per_s),
            loss=None if loss is None else float(loss),
            tokens=int(tokens),
        )
        check_sendable(progress, "This heartbeat")
        link.progress = progress
        link.tell(BeatNow())

    def leave(self, reason: str = "") -> None:
        """Tell the broker and close the connection. May be called more than once."""
        link, self._link = self._link, None
        if link is not None:
            link.close(reason)
        self._joined = False
        self._pulled = None
        self._flights.clear()

    # Requests.

    def status(self) -> dict[str, Any]:
        """The broker's snapshot, as on its feed. Raises Refused and Unreachable."""
        result = self.control("status")
        if not result.ok:
            raise Refused(Code.UNKNOWN_ACTION, result.text)
        return dict(result.data)

    def control(self, action: str, **arguments: Any) -> Result:
        """Execute a control action at the broker. A refused one has `ok` False and a `text`.

        Raises:
            UsageError: an argument that cannot be sent.
            Unreachable: no answer within the timeout, or the connection broke; the action may have
                been executed.
        """
        request = next(self._requests)
        asked = Control(action, request, arguments)
        check_sendable(asked, f"The action {action!r:.80} with these arguments")
        link = self._connect()
        link.tell(Ask(asked))
        try:
            self._await(lambda: request in link.results, f"waiting for the answer to {action!r}")
        except BaseException:
            link.withdraw(request)
            raise
        with link.condition:
            answer = link.results.pop(request)
        if answer.ok is None:
            raise Unreachable(f"{self.server}: {answer.text}")
        return Result(request, answer.ok, answer.text, answer.data)

    def _connect(self) -> Link:
        """The link; as an observer if this client has not joined."""
        return self._link or self._begin(Session(None, lambda: secrets.randbits(64)))

    def _begin(self, session: Session, **options: Any) -> Link:
        self._link = Link(self.server, session, follows_rounds=False, keys=self._keys, **options)
        self._link.start()
        return self._link

    def _observe(self) -> None:
        """Get the model and the configuration without joining."""
        link = self._connect()
        deadline = time.monotonic() + self.timeout
        while True:
            result = self.control("manifest")
            if result.ok:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise Refused(Code.NO_MODEL, result.text, retry=True)
            link.wait_for(lambda: False, min(ASK_AGAIN_S, left))
        try:
            manifest = from_plain(Manifest, result.data.get("manifest"), "manifest")
            config = from_plain(RunConfig, result.data.get("config"), "config")
            plan = tuple(result.data.get("plan") or ())
            terms = Terms(config, plan, cut(manifest, config, plan))
        except ProtocolError as error:
            raise Refused(error.code, f"The broker's model cannot be read: {error}") from None
        link.tell(Observe(terms))
        self._pulled = PulledModel(manifest, terms, link)
        for part in terms.layout.all:
            if part.chunks:
                link.tell(RequestVersion(part.fragment))

    def _take_all(self, pulled: PulledModel, what: str) -> None:
        """Wait for the first version of every fragment."""
        link = pulled.link
        fragments = [part.fragment for part in pulled.layout.all if part.chunks]
        self._await(lambda: all(each in link.arrivals for each in fragments), what)
        for fragment in fragments:
            pulled.take(link.take(fragment))

    def _take_newest(
        self, pulled: PulledModel, fragments: Sequence[int], after: int | None
    ) -> None:
        """Wait for the newest version of these fragments; of fragment 0, for one above `after`."""
        link = pulled.link
        above = {fragment: after if fragment == 0 else None for fragment in fragments}
        for fragment in fragments:
            pulled.take(link.take(fragment))  # one that came unasked
            link.tell(RequestVersion(fragment, above[fragment]))
        for fragment in fragments:
            floor = above[fragment]
            what = "the newest version" if floor is None else f"a version above {floor}"
            self._await(partial(link.arrivals.__contains__, fragment), f"waiting for {what}")
            pulled.take(link.take(fragment))

    def _await_flight(self, link: Link, fragment: int) -> Arrival:
        flight = self._flights[fragment]
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            self._await(
                lambda: fragment in link.arrivals or flight in link.rejections,
                "waiting for the round to close",
                timeout=left,
            )
            self._raise_rejection(link, fragment)
            arrival = link.take(fragment)
            if arrival is not None and flight in arrival.counted:
                del self._flights[fragment]
                return arrival

    def _raise_rejection(self, link: Link, fragment: int) -> None:
        rejection = link.take_rejection(self._flights[fragment])
        if rejection is not None:
            del self._flights[fragment]
            raise Refused(rejection.code, rejection.text)

    def _require_joined(self) -> PulledModel:
        if not self._joined or self._pulled is None:
            raise UsageError("This client has not joined the run; call join() first.")
        return self._pulled

    def _await(self, what: Callable[[], bool], doing: str, *, timeout: float | None = None) -> None:
        """Wait until `what` is true; raises Refused or Unreachable when it does not come."""
        link = self._link
        assert link is not None
        timeout = self.timeout if timeout is None else max(0.0, timeout)
        if link.wait_for(lambda: what() or link.phase is Phase.REFUSED, timeout) and what():
            return
        if link.refusal is not None and link.phase is Phase.REFUSED:
            raise link.refusal
        if link.has_ended:
            raise Unreachable(f"The link to {self.server} has ended: {link.last_error}")
        raise Unreachable(
            f"Gave up after {timeout:g} s of {doing} at {self.server}: "
            f"{link.describe().rstrip('.')}."
        )


@dataclass(frozen=True)
class GlobalParameters:
    """One version of the global parameters."""

    version: VersionId  # with fragments that of fragment 0
    # Every entry of `state_dict`, tied ones under each of their names, on the CPU, in the model's
    # dtypes; the caller's own.
    tensors: dict[str, Tensor]
    ledger: Ledger  # the pushes contained in `version`
    versions: dict[int, VersionId] = field(default_factory=dict)  # of each trained fragment


class PulledModel:
    """The run's model as pulled so far."""

    def __init__(self, manifest: Manifest, terms: Terms, link: Link) -> None:
        self.manifest = manifest
        self.layout = terms.layout
        self.config = terms.config
        self.link = link
        self.versions: dict[int, VersionId] = {}  # by fragment
        self._states: dict[int, FlatState] = {}
        self._ledger = Ledger()  # of fragment 0

    def take(self, arrival: Arrival | None) -> None:
        """Take in an arrived version, if any."""
        if arrival is None:
            return
        released = arrival.released
        if arrival.values is not None:
            self._states[released.fragment] = arrival.values
            self.link.set_base(released.fragment, arrival.values)
        self.versions[released.fragment] = released.version
        if released.fragment == 0:
            self._ledger = released.ledger

    def part(self, fragment: int | None) -> FragmentLayout:
        """The fragment to push; raises UsageError for one that does not exist."""
        parts = self.layout.fragments
        if fragment is None and len(parts) == 1:
            return parts[0]
        if fragment is None or not 0 <= fragment < len(parts):
            raise UsageError(
                f"push() was given fragment {fragment}, and this run has {len(parts)}; give one of "
                f"0 to {len(parts) - 1}."
            )
        return parts[fragment]

    def parameters(self) -> GlobalParameters:
        """The pulled versions, as tensors that are the caller's own."""
        here: dict[str, Tensor] = {}
        for state in self._states.values():
            here |= state.by_name()
        tensors: dict[str, Tensor] = {}
        for entry in self.manifest.entries:
            value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            if entry.name in here:  # else of a fragment without elements
                value.copy_(here[entry.name])
            for name in (entry.name, *entry.aliases):
                tensors[name] = value
        trained = {part.fragment: self.versions[part.fragment] for part in self.layout.fragments}
        return GlobalParameters(self.versions[0], tensors, self._ledger, trained)

    def complete(self, part: FragmentLayout, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The delta of each tensor of a fragment; raises UsageError for what does not fit."""
        whole: dict[str, Tensor] = {}
        trained = (place.entry for each in self.layout.fragments for place in each.places)
        known = {name for entry in trained for name in (entry.name, *entry.aliases)}
        for place in part.places:
            entry = place.entry
            names = (entry.name, *entry.aliases)
            given = next((delta[name] for name in names if name in delta), None)
            if given is None:
                if place.segment is Segment.PARAMETERS:
                    raise UsageError(f"The pseudo-gradient lacks {entry.name!r}.")
                given = self._states[part.fragment].of(place)
            if tuple(given.shape) != entry.shape:
                raise UsageError(
                    f"The pseudo-gradient of {entry.name} has shape {list(given.shape)}, the model "
                    f"has {list(entry.shape)}."
                )
            whole[entry.name] = given
        strange = [name for name in delta if name not in known]
        if strange:
            raise UsageError(f"The run does not train {strange[0]!r}; leave it out.")
        return whole
