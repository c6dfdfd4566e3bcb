"""The order of the units of a data set in an epoch, computed for each position instead of stored.

A *ticket* counts units over all epochs: ticket t is position t mod K of epoch t // K. The unit at a
position is given by a permutation that depends on seed and epoch: a Feistel network over the next power
of four, iterated until the result is below K (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002).
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 4


def unit_of(ticket: int, size: int, seed: int | None) -> tuple[int, int]:
    """Epoch and unit of a ticket, for a data set of `size` units; without a seed units are in order."""
    epoch, place = divmod(ticket, size)
    if seed is None:
        return epoch, place
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    key = f"{seed}/{epoch}/".encode()
    while True:
        place = _mixed(place, half, key)
        if place < size:
            return epoch, place


def _mixed(place: int, half: int, key: bytes) -> int:
    """A permutation of the numbers of 2 * `half` bits."""
    mask = (1 << half) - 1
    left, right = place >> half, place & mask
    for turn in range(ROUNDS):
        digest = blake2b(b"%s%d/%d" % (key, turn, right), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right
