"""The order in which an epoch has the units of a data set: worked out for each place, never stored.

A *ticket* counts units over all epochs: ticket t is place t mod K of epoch t // K, and which unit stands
at a place is a permutation that the seed and the epoch choose. It is a Feistel network over the next
power of four, walked until it is below K (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002).
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 4


def unit_of(ticket: int, size: int, seed: int | None) -> tuple[int, int]:
    """Epoch and unit of a ticket, of a data set of `size` units; without a seed they come in order."""
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
