"""How a version in few bits goes to a reader, by what the reader holds."""

from __future__ import annotations

from diloco_broker.core.versions.reply import LONGEST_CHAIN, Chain, Coded, Reply
from diloco_protocol.version import VersionId

WHOLE = bytes(100)


def version(counter: int, tag: int = 0) -> VersionId:
    return VersionId("00000000000000aa", counter, tag or 1000 + counter)


def chained(count: int, size: int = 10) -> Chain:
    """Versions 1 to `count`, each a code of its number, `size` times."""
    chain = Chain()
    for number in range(1, count + 1):
        chain.follows(version(number), version(number - 1), [memoryview(bytes([number]) * size)])
    return chain


def told(chain: Chain, held: VersionId | None, counter: int, size: int = 10) -> Reply:
    last = Coded(memoryview(WHOLE), memoryview(bytes([counter]) * size), 77)
    return chain.reply(last, 0, version(counter), held)


def test_reader_that_has_the_version_before_gets_one_code() -> None:
    reply = told(chained(3), version(2), 3)
    assert bytes(reply.payload) == bytes([3]) * 10
    assert reply.says == {"delta_of": version(2), "parts": (10,), "checksum": 77}


def test_reader_that_has_missed_some_gets_their_codes_in_order() -> None:
    reply = told(chained(5), version(2), 5)
    assert bytes(reply.payload) == bytes([3]) * 10 + bytes([4]) * 10 + bytes([5]) * 10
    assert reply.says["parts"] == (10, 10, 10)


def test_reader_gets_the_chunk_whole_where_no_chain_leads_to_it_or_a_longer_one() -> None:
    chain = chained(20)
    assert told(chain, None, 20) == Reply(memoryview(WHOLE))
    assert told(chain, version(20 - LONGEST_CHAIN - 1), 20).says == {}
    assert told(chain, version(20 - LONGEST_CHAIN), 20).says["parts"] == (10,) * LONGEST_CHAIN
    assert told(chained(20, size=50), version(18), 20, size=50).says == {}, "as long as the chunk"
    assert told(chain, version(19, tag=5), 20).says == {}, "of another branch"


def test_version_that_came_to_nothing_is_in_no_chain() -> None:
    chain = chained(3)
    chain.follows(version(4, tag=5), version(3), [memoryview(b"lost")])
    chain.follows(version(4), version(3), [memoryview(b"made")])
    assert chain.between(version(3), version(4)) == [[b"made"]]
    assert chain.between(version(3), version(4, tag=5)) is None


def test_chunk_without_a_code_goes_whole_and_so_it_goes_to_all_behind_it() -> None:
    chain = chained(2)
    chain.follows(version(3), version(2), [None])
    chain.follows(version(4), version(3), [memoryview(b"4")])
    assert told(chain, version(3), 4).says["parts"] == (1,)
    assert told(chain, version(1), 4).says == {}


def test_what_is_no_code_always_goes_as_it_is() -> None:
    assert chained(2).reply(b"as it is", 0, version(2), version(1)) == Reply(b"as it is")


def test_readers_that_have_missed_the_same_share_what_they_are_sent() -> None:
    chain = chained(5)
    assert told(chain, version(2), 5).payload is told(chain, version(2), 5).payload
    assert told(chain, version(3), 5).payload is not told(chain, version(2), 5).payload
    old = told(chain, version(2), 5).payload
    chain.follows(version(6), version(5), [memoryview(b"6")])
    chain.follows(version(7), version(6), [memoryview(b"7")])
    assert told(chain, version(2), 5).payload is not old, "it is kept while it is the newest"
