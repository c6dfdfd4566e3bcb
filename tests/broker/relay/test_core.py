"""What a relay says to its hub and to its site: the core alone, with buffers whose mean is their sum."""

from collections.abc import Iterable
from itertools import count
from typing import Any, TypeVar

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.relay import core
from diloco_broker.relay.core import Close, Command, Reconnect, SendDown, SendUp, Term
from diloco_protocol import VersionId, messages
from diloco_protocol.chunks import ChunkSpan
from diloco_protocol.errors import Code
from diloco_protocol.messages import Collect, Combined, Forget, Held, Part, Purpose, Via
from diloco_protocol.relays import way

C = TypeVar("C")
M = TypeVar("M", bound=messages.Message)
RUN = "0123456789abcdef"
TOKEN = b"12345678"
# One fragment of 6 parameters in chunks of 4.
TERMS = messages.Attached(TOKEN, True, "fp32", chunk_elements=4, fragments=((6, 0, 0),))


def route(name: str) -> bytes:
    """As ZeroMQ names connections."""
    return b"\0" + name.encode().rjust(4, b".")


def a_sum(value: int) -> memoryview:
    """With as many bytes as a chunk."""
    return memoryview(b"%016d" % value)


def welcome(session: bytes) -> messages.Welcome:
    return messages.Welcome(session, "epoch", BrokerConfig().run_config, 0)


class Lists:
    """A buffer holds a number; a mean names what is in it."""

    def __init__(self) -> None:
        self.forgotten = 0

    def inspect(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        value = int(bytes(payload))
        return (None, 0) if value < 0 else (float(value * value), span.index)

    def mean(self, fragment: int, span: ChunkSpan, terms: list[Term], wire_dtype: str) -> Any:
        return [(int(bytes(each.payload)), each.weight) for each in terms]

    def reset(self) -> None:
        self.forgotten += 1


class Site:
    """A relay that its hub has let in, and what it did last."""

    def __init__(self, wire_dtype: str | None = None) -> None:
        numbers = count(1)
        self.sums = Lists()
        self.relay = core.Relay("north", lambda: next(numbers), self.sums, wire_dtype)
        self.did: list[Command] = []
        self.do(self.relay.connected(0.0))
        self.hub(TERMS)

    def do(self, commands: Iterable[Command]) -> list[Command]:
        """What the relay asks of its shell, which ends connections as it is told."""
        self.did = []
        for command in commands:
            self.did.append(command)
            if isinstance(command, Close):
                self.did += list(self.relay.closed(command.route))
        return self.did

    def only(self, kind: type[C]) -> list[C]:
        return [each for each in self.did if isinstance(each, kind)]

    def ups(self, kind: type[messages.Message]) -> list[SendUp]:
        return [each for each in self.only(SendUp) if isinstance(each.message, kind)]

    def downs(self, kind: type[M]) -> list[tuple[bytes, M]]:
        """Messages of this kind to the site, with their connections."""
        sent = [(each.route, each.message) for each in self.only(SendDown)]
        return [(where, each) for where, each in sent if isinstance(each, kind)]

    def hub(
        self,
        message: messages.Message,
        payload: Any = None,
        *,
        to: bytes | None = None,
        at: float = 0.0,
        bulk: bool = False,
    ) -> None:
        via = None if to is None else Via(to)
        self.do(self.relay.receive_from_hub(via, message, payload, at, bulk=bulk))

    def says(self, where: bytes, message: messages.Message, payload: Any = None) -> None:
        self.do(self.relay.receive(where, None, message, payload))

    def offers(self, name: str, **given: Any) -> None:
        push = messages.Push(name.encode(), 1, 0, 2, "fp32", **given)
        self.says(route(name), push)
        self.hub(messages.Grant(1, 0, messages.Standing.NEW, credit=2), to=route(name))

    def sends(self, name: str, index: int, value: int) -> Held | None:
        """A worker sends a chunk; what the hub is told of it."""
        chunk = messages.Chunk(0, index, name.encode(), 1)
        self.says(route(name + "+"), chunk, memoryview(b"%d" % value))
        (up,) = self.ups(messages.Chunk)
        assert up.via is not None
        assert (up.payload is None) == (up.via.held is not None)
        return up.via.held

    def holds(self, name: str, index: int, value: int) -> int:
        """Its number."""
        held = self.sends(name, index, value)
        assert held is not None and held.squares == value * value
        return held.number

    # A relay behind this one.

    def deep(self, name: str = "deep") -> None:
        incarnation = int.from_bytes(name.encode(), "big")
        self.says(route(name), messages.Attach(name, incarnation))
        ((_, terms),) = self.downs(messages.Attached)
        self.says(route(name + "+"), messages.Attach(name, incarnation, terms.token))

    def holds_deep(self, number: int, *, at: str = "deep", who: str = "x") -> int:
        """The relay behind tells of a chunk with this number; what number the hub is told."""
        via = Via(route(who), None, Held(number, 8, 9.0))
        chunk = messages.Chunk(0, 0, who.encode(), 1)
        self.do(self.relay.receive(route(at + "+"), via, chunk, via.held))
        (up,) = self.ups(messages.Chunk)
        assert up.payload is None and up.via is not None and up.via.held is not None
        assert up.via.who == way(route(at + "+"), route(who))
        return up.via.held.number

    def collects(self, request: int, *parts: tuple[int, float], index: int = 0) -> None:
        self.hub(Collect(request, 0, index, tuple(Part(*each) for each in parts)))

    def answer(self) -> tuple[Combined, Any]:
        (up,) = self.ups(Combined)
        assert up.bulk and up.via is None
        assert isinstance(up.message, Combined)
        return up.message, up.payload


@pytest.fixture
def site() -> Site:
    return Site()


def test_messages_of_a_worker_and_their_answers_pass_unchanged(site: Site) -> None:
    join = messages.Join("a")
    site.says(route("a"), join)
    assert site.did == [SendUp(join, None, Via(route("a")))]
    notice = messages.Notice("alive")
    site.hub(notice, to=route("a"))
    assert site.did == [SendDown(route("a"), notice)]
    site.hub(notice, to=way(route("deep"), route("x")))
    assert site.did == [SendDown(route("deep"), notice, None, Via(route("x")))]


def test_workers_are_refused_until_the_hub_has_admitted_the_relay() -> None:
    site = Site()
    site.do(site.relay.disconnected("it restarts"))
    site.says(route("a"), messages.Join("a"))
    (down,) = site.only(SendDown)
    assert isinstance(down.message, messages.Error)
    assert (down.message.code, down.message.retry) == (Code.STANDBY, True)
    site.says(route("b"), messages.Credit(1))
    assert site.did == [Close(route("b"))]


def test_connection_ends_where_the_hub_says_so(site: Site) -> None:
    site.offers("a")
    site.hub(messages.Gone(route("a")))
    assert site.only(Close) == [Close(route("a"))]
    site.hub(messages.Gone(way(route("deep"), route("x"))))
    assert site.did == [SendDown(route("deep"), messages.Gone(route("x")))]


def test_only_admitted_workers_and_relays_count_as_members(site: Site) -> None:
    site.says(route("a"), messages.Join("a"))
    site.says(route("a+"), messages.Credit(1, session=b"session"))
    site.hub(messages.Error(Code.NOT_ALLOWED, "no"), to=route("a"))
    assert not site.relay.members
    site.hub(welcome(b"session"), to=route("a"))
    assert site.relay.members == {route("a")}
    site.says(route("a+"), messages.Credit(1, session=b"another"))
    assert site.relay.members == {route("a")}
    site.says(route("a+"), messages.Credit(1, session=b"session"))
    assert site.relay.members == {route("a"), route("a+")}
    site.deep()
    assert site.relay.members == {route(name) for name in ("a", "a+", "deep", "deep+")}


def test_hub_hears_of_a_closed_connection_and_again_when_it_still_sends_to_it(site: Site) -> None:
    site.offers("a")
    for _ in range(2):
        site.do(site.relay.closed(route("a")))
        assert site.did == [SendUp(messages.Gone(route("a")))]


def test_data_connections_of_a_worker_are_closed_with_its_control_connection(site: Site) -> None:
    site.says(route("a"), messages.Join("a"))
    site.hub(welcome(b"session"), to=route("a"))
    site.says(route("a+"), messages.Credit(1, session=b"session"))
    site.hub(welcome(b"next"), to=route("a"))  # it joined again on the same connections
    site.says(route("a+"), messages.Credit(1, session=b"next"))
    site.do(site.relay.closed(route("a")))
    assert site.only(Close) == [Close(route("a+"))]
    site.says(route("a+"), messages.Credit(1, session=b"next"))
    assert not site.relay.members, "the session admits no other connection"


def test_silent_relay_behind_this_one_is_closed(site: Site) -> None:
    site.deep()
    other = site.holds_deep(4)
    site.hub(messages.Notice("alive"), to=route("a"), at=1000.0)
    site.do(site.relay.tick(1000.0))
    site.collects(1, (other, 1.0))
    assert not site.ups(Combined)
    site.hub(messages.Notice("alive"), to=route("a"), at=1000.0 + core.HUB_TIMEOUT_S)
    site.do(site.relay.tick(1001.0 + core.HUB_TIMEOUT_S))
    assert Close(route("deep")) in site.did
    assert site.answer()[0].numbers == ()


def test_relay_behind_that_reconnects_replaces_its_former_connections(site: Site) -> None:
    site.deep()
    other = site.holds_deep(4)
    site.says(route("again"), messages.Attach("deep", int.from_bytes(b"deep", "big")))
    assert {each.route for each in site.only(Close)} == {route("deep"), route("deep+")}
    assert site.downs(messages.Attached)
    site.collects(1, (other, 1.0))
    assert site.answer()[0].numbers == ()


def test_attaches_a_bounded_number_of_relays(site: Site) -> None:
    for number in range(core.MOST_RELAYS):
        site.says(route(f"{number}"), messages.Attach(f"{number}", number))
        assert site.downs(messages.Attached)
    site.says(route("more"), messages.Attach("more", 7))
    assert site.only(Close) == [Close(route("more"))]


def test_only_a_relay_can_speak_for_others(site: Site) -> None:
    site.do(site.relay.receive(route("a"), Via(route("b")), messages.Join("b"), None))
    assert not site.did


def test_sum_is_of_the_chunks_that_were_asked_for_and_each_is_in_one(site: Site) -> None:
    for name in "abc":
        site.offers(name)
    first, second, third = (
        site.holds(name, 0, value) for name, value in zip("abc", (1, 2, 3), strict=True)
    )
    site.collects(5, (first, 0.5), (third, 2.0))
    combined, mean = site.answer()
    assert combined == Combined(5, 0, 0, (first, third), "fp32")
    assert mean == [(1, 0.5), (3, 2.0)]
    site.collects(2, (first, 1.0), (second, 1.0), (99, 1.0))
    assert site.answer()[0].numbers == (second,)
    site.collects(3, (first, 1.0))
    combined, mean = site.answer()
    assert (combined.numbers, mean) == ((), None)


def test_chunk_that_is_alone_goes_as_it_came_unless_another_dtype_is_wanted() -> None:
    for dtype, found in ((None, b"7"), ("fp32", b"7"), ("int4", [(7, 3.0)])):
        site = Site(dtype)
        site.offers("a")
        site.collects(1, (site.holds("a", 1, 7), 3.0), index=1)
        combined, mean = site.answer()
        assert combined.wire_dtype == (dtype or "fp32")
        assert mean == found


def test_chunk_that_is_not_finite_is_told_and_not_held(site: Site) -> None:
    site.offers("a")
    held = site.sends("a", 0, -1)
    assert held is not None and held.squares is None
    assert site.relay.held_bytes == 0


@pytest.mark.parametrize(
    ("offer", "index", "value", "wire_dtype"),
    [
        pytest.param({"purpose": Purpose.SEEDING}, 0, 1, None, id="of a seed worker"),
        pytest.param(None, 0, 1, None, id="of no push"),
        pytest.param({}, 2, 1, None, id="beyond the model"),
        pytest.param({}, 0, int(10 * core.LARGEST), None, id="too large to be added to others"),
        pytest.param({}, 0, 100_000, "fp16", id="too large for fp16"),
    ],
)
def test_chunk_that_fits_no_sum_goes_on(
    offer: Any, index: int, value: int, wire_dtype: str | None
) -> None:
    site = Site(wire_dtype)
    if offer is not None:
        site.offers("a", **offer)
    assert site.sends("a", index, value) is None


def test_hub_that_needs_each_push_gets_each(site: Site) -> None:
    site.hub(messages.Attached(TOKEN, False, "fp32", 4, TERMS.fragments))
    site.offers("a")
    assert site.sends("a", 0, 1) is None


def test_chunks_that_the_hub_has_not_asked_for_are_not_held(site: Site) -> None:
    for number in range(100):
        session = b"session-%d" % number
        for fragment in (0, 1000 + number):
            site.says(route("a"), messages.Push(session, number, fragment, 2, "fp32"))
        site.says(route("a+"), messages.Chunk(0, 0, session, number), a_sum(1))
    assert site.relay.held_bytes == 0
    assert len(site.relay._offers) == 1


def test_chunk_that_comes_again_is_not_held_again(site: Site) -> None:
    site.offers("a")
    site.holds("a", 0, 11)
    for _ in range(3):
        site.says(route("a"), messages.Push(b"a", 1, 0, 2, "fp32"))
        assert site.sends("a", 0, 11) is None
    assert site.relay.held_bytes == 2


def test_chunks_are_forgotten_when_the_hub_says_so(site: Site) -> None:
    site.offers("a")
    first, second = site.holds("a", 0, 11), site.holds("a", 1, 222)
    assert site.relay.held_bytes == 5
    site.hub(Forget((first,)))
    assert site.relay.held_bytes == 3
    site.collects(1, (first, 1.0))
    assert site.answer()[0].numbers == ()
    site.collects(2, (second, 1.0), index=1)
    assert site.answer()[0].numbers == (second,)


@pytest.mark.parametrize(("found", "weight"), [((4, 6), 2.5), ((6,), 0.5)], ids=["all", "some"])
def test_sum_has_the_weight_of_terms(site: Site, found: tuple[int, ...], weight: float) -> None:
    site.deep()
    site.offers("a")
    own, others = site.holds("a", 0, 1), {number: site.holds_deep(number) for number in (4, 6)}
    site.collects(1, (others[4], 2.0), (own, 1.0), (others[6], 0.5))
    ((where, asked),) = site.downs(Collect)
    assert (where, asked.parts) == (route("deep"), (Part(4, 2.0), Part(6, 0.5)))
    assert not site.ups(Combined)
    site.says(route("deep+"), Combined(asked.request, 0, 0, found, "fp32"), a_sum(50))
    combined, mean = site.answer()
    assert set(combined.numbers) == {own, *(others[number] for number in found)}
    assert mean == [(1, 1.0), (50, weight)]


def test_sums_of_two_relays_are_added_in_one_order(site: Site) -> None:
    site.deep("d")
    site.deep("e")
    parts = [site.holds_deep(0, at=at) for at in "de"]
    site.collects(1, (parts[0], 1.0), (parts[1], 2.0))
    asked = {where: each.request for where, each in site.downs(Collect)}
    for name, value in (("e", 6), ("d", 5)):
        combined = Combined(asked[route(name)], 0, 0, (0,), "fp32")
        site.says(route(name + "+"), combined, a_sum(value))
    assert site.answer()[1] == [(5, 1.0), (6, 2.0)]


@pytest.mark.parametrize("dies", [False, True], ids=["answers with a wrong size", "dies"])
def test_relay_behind_that_fails_when_it_is_asked_is_left_out(site: Site, dies: bool) -> None:
    site.deep()
    site.offers("a")
    own, other = site.holds("a", 0, 1), site.holds_deep(4)
    site.collects(1, (own, 1.0), (other, 1.0))
    ((_, asked),) = site.downs(Collect)
    if not dies:
        site.says(route("deep+"), Combined(asked.request, 0, 0, (4,), "fp32"), memoryview(b"50"))
        assert site.answer()[0].numbers == (own,)
        return
    site.do(site.relay.closed(route("deep")))
    assert site.answer()[0].numbers == (own,)
    assert Close(route("deep+")) in site.did
    gone = [route("deep"), route("deep+"), way(route("deep+"), route("x"))]
    told = [each.message for each in site.ups(messages.Gone)]
    assert all(messages.Gone(each) in told for each in gone)


def test_relay_behind_that_died_before_is_not_asked(site: Site) -> None:
    site.deep()
    other = site.holds_deep(4)
    site.do(site.relay.closed(route("deep+")))
    site.collects(1, (other, 1.0))
    assert not site.downs(Collect)
    assert site.answer()[0].numbers == ()


def test_relay_behind_forgets_what_this_one_does(site: Site) -> None:
    site.deep()
    numbers = [site.holds_deep(number) for number in (4, 6, 8)]
    site.hub(Forget((numbers[0], numbers[2])))
    assert site.did == [SendDown(route("deep"), Forget((4, 8)))]
    site.collects(1, (numbers[1], 1.0))
    ((_, collect),) = site.downs(Collect)
    assert [part.number for part in collect.parts] == [6]


def test_relay_behind_hears_of_new_terms(site: Site) -> None:
    site.deep()
    other = messages.Attached(TOKEN, True, "bf16", 4, ((8, 0, 0),))
    site.hub(other)
    ((where, terms),) = site.downs(messages.Attached)
    assert (where, terms.fragments) == (route("deep"), other.fragments)
    assert terms.token != TOKEN


def test_connection_with_a_token_that_was_not_given_is_ended(site: Site) -> None:
    site.says(route("x"), messages.Attach("deep", 7, b"made up"))
    assert site.only(Close) == [Close(route("x"))]


def chunk_of(counter: int, index: int = 0) -> messages.Chunk:
    return messages.Chunk(0, index, version=VersionId(RUN, counter, 1))


def test_chunk_of_a_version_comes_once_and_goes_to_each(site: Site) -> None:
    site.hub(chunk_of(3), b"values", to=route("a"), bulk=True)
    site.hub(chunk_of(3), to=route("b"), bulk=True)
    assert site.did == [SendDown(route("b"), chunk_of(3), b"values")]
    site.hub(chunk_of(4), b"newer", to=route("a"), bulk=True)
    site.hub(chunk_of(3), to=way(route("deep+"), route("x")), bulk=True)
    assert site.did == [SendDown(route("deep+"), chunk_of(3), b"values", Via(route("x")))]


def test_chunk_of_a_version_goes_to_a_relay_behind_this_one_once(site: Site) -> None:
    site.deep()
    for number, worker in enumerate("abc"):
        payload = None if number else b"values"
        site.hub(chunk_of(3), payload, to=way(route("deep+"), route(worker)), bulk=True)
        assert [each.payload for each in site.only(SendDown)] == [payload]


def test_silent_hub_is_dropped_with_its_connections(site: Site) -> None:
    site.offers("a")
    number = site.holds("a", 0, 1)
    site.do(site.relay.tick(10.0))
    assert site.ups(messages.Probe) and not site.only(Reconnect)
    site.do(site.relay.tick(1000.0))
    assert {each.route for each in site.only(Close)} == {route("a"), route("a+")}
    assert site.only(Reconnect)
    assert site.relay.held_bytes == 0 and not site.relay.members
    site.do(site.relay.connected(1001.0))
    assert site.ups(messages.Attach)
    site.hub(TERMS, at=1001.0)
    site.collects(1, (number, 1.0))
    assert site.answer()[0].numbers == ()


def test_hub_that_speaks_is_not_given_up(site: Site) -> None:
    for second in range(0, 100, 5):
        site.hub(messages.Probe(0), at=float(second))
        site.do(site.relay.tick(second + 1.0))
        assert not site.only(Reconnect)


def test_residuals_go_with_the_model(site: Site) -> None:
    """Also where another run is at the hub's address when the relay comes back."""
    other = messages.Attached(TOKEN, True, "fp32", 4, ((9, 0, 0),))
    before = site.sums.forgotten
    site.hub(TERMS)
    assert site.sums.forgotten == before
    site.hub(other)
    assert site.sums.forgotten == before + 1
    site.do(site.relay.disconnected("it restarts"))
    site.do(site.relay.connected(2.0))
    site.hub(other)
    assert site.sums.forgotten == before + 1
    site.do(site.relay.disconnected("another run takes its address"))
    site.do(site.relay.connected(3.0))
    site.hub(TERMS)
    assert site.sums.forgotten == before + 2


def test_run_that_is_over_is_over_for_relays_behind(site: Site) -> None:
    site.deep()
    site.hub(messages.Notice("shutdown", "all rounds are done"))
    assert site.only(core.Stop)
    assert [where for where, _ in site.downs(messages.Notice)] == [route("deep")]
