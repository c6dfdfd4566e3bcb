"""How a quantized version goes to a reader, by what the reader holds."""

from diloco_broker.core.versions.fragment import FragmentVersions, VersionInProgress
from diloco_broker.core.versions.reply import LONGEST_CHAIN, Chain, Coded, Reply
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Segment
from diloco_protocol.messages import Chunk
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
    return chain.reply(last, Chunk(0, 0, version=version(counter)), held)


def test_reader_gets_the_codes_of_the_versions_that_it_has_missed_in_order() -> None:
    reply = told(chained(3), version(2), 3)
    assert bytes(reply.payload) == bytes([3]) * 10
    expected = Chunk(0, 0, version=version(3), delta_of=version(2), parts=(10,), checksum=77)
    assert reply.message == expected
    reply = told(chained(5), version(2), 5)
    assert bytes(reply.payload) == bytes([3]) * 10 + bytes([4]) * 10 + bytes([5]) * 10
    assert reply.message.parts == (10, 10, 10)


def test_full_chunk_is_sent_where_no_shorter_chain_leads_to_it() -> None:
    chain = chained(20)
    whole = Chunk(0, 0, version=version(20))
    assert told(chain, None, 20) == Reply(whole, memoryview(WHOLE))
    assert told(chain, version(20 - LONGEST_CHAIN - 1), 20).message.parts is None
    assert told(chain, version(20 - LONGEST_CHAIN), 20).message.parts == (10,) * LONGEST_CHAIN
    as_long = told(chained(20, size=50), version(18), 20, size=50)
    assert as_long.message.parts is None, "as long as the chunk"
    assert told(chain, version(19, tag=5), 20).message.parts is None, "of another branch"


def test_abandoned_version_is_in_no_chain() -> None:
    chain = chained(3)
    chain.follows(version(4, tag=5), version(3), [memoryview(b"lost")])
    chain.follows(version(4), version(3), [memoryview(b"made")])
    assert chain.between(version(3), version(4)) == [[b"made"]]
    assert chain.between(version(3), version(4, tag=5)) is None


def test_chunk_without_a_code_is_sent_in_full_to_all_behind_it() -> None:
    chain = chained(2)
    chain.follows(version(3), version(2), [None])
    chain.follows(version(4), version(3), [memoryview(b"4")])
    assert told(chain, version(3), 4).message.parts == (1,)
    assert told(chain, version(1), 4).message.parts is None


def test_plain_chunk_is_sent_unchanged() -> None:
    whole = Chunk(0, 0, version=version(2))
    assert chained(2).reply(b"as it is", whole, version(1)) == Reply(whole, b"as it is")


def test_readers_that_hold_the_same_share_what_they_are_sent() -> None:
    versions, newest = being_made(5)
    found = [versions.reply(newest, 0, held) for held in (version(2), version(2), version(3), None)]
    assert found[0] is found[1]
    assert len({bytes(reply.payload) for reply in found}) == 3


def test_unknown_versions_cost_no_memory() -> None:
    versions, newest = being_made(5)
    found = {id(versions.reply(newest, 0, version(2, tag=tag))) for tag in range(1, 50)}
    assert found == {id(versions.reply(newest, 0, None))}


def being_made(counter: int) -> tuple[FragmentVersions, VersionInProgress]:
    """A version whose one chunk has been stepped."""
    layout = FragmentLayout(0, (), (ChunkSpan(0, Segment.PARAMETERS, 0, 25),), {})
    chunk = Coded(memoryview(WHOLE), memoryview(bytes([counter]) * 10), 77)
    made = VersionInProgress(version(counter), counter, [chunk], [chunk.code], 0)
    return FragmentVersions(layout, in_progress=made, chain=chained(counter)), made
