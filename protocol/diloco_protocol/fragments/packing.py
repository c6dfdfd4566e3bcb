"""Packing sizes into groups whose largest is as small as can be: what the pattern `balanced` needs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

# The largest balanced fragment stays within 6/5 of the mean wherever single tensors allow.
BALANCE = (6, 5)
# Halvings of the capacity in MULTIFIT: after 12 it is known to a ten-thousandth of the mean.
CAPACITIES_TRIED = 12
# Partial packings looked at in the search: a dozen tensors need about a hundred, and this many take
# about a second at most.
PACKINGS_TRIED = 20_000

# Positions in a list of sizes, one list for each fragment.
Groups = list[list[int]]


def pack(sizes: Sequence[int], number: int) -> Groups:
    """Groups of descending sizes, none empty, with a largest group as small as we can make it.

    Largest first is within 4/3 of the optimum (Graham 1969), MULTIFIT within 13/11 (Coffman, Garey
    and Johnson 1978; the bound is Yue's, 1990). Neither always finds a packing within BALANCE of the
    mean where there is one, so then it is searched for.
    """
    best = _largest_first(sizes, number)
    low, high = _lower_bound(sizes, number), _largest(sizes, best)
    limit = sum(sizes) * BALANCE[0] // (number * BALANCE[1])
    least = low
    for _ in range(CAPACITIES_TRIED):
        if least >= high:
            break
        capacity = (least + high - 1) // 2
        packed = _first_fit(sizes, number, capacity)
        if packed is None:
            least = capacity + 1
        else:
            best, high = packed, _largest(sizes, packed)
    if low <= limit < high:
        best = _search(sizes, number, limit) or best
    for group in best:
        if not group:
            # The last of a group is its smallest, and no group grows past the one it came from.
            giver = max((g for g in best if len(g) > 1), key=lambda g: sum(sizes[i] for i in g))
            group.append(giver.pop())
    return best


def _largest(sizes: Sequence[int], groups: Groups) -> int:
    return max(sum(sizes[i] for i in group) for group in groups)


def _lower_bound(sizes: Sequence[int], number: int) -> int:
    """No packing has a smaller largest group: of the first k P + 1 sizes, k + 1 share a group."""
    sums = [0, *accumulate(sizes)]
    mean = -(-sums[-1] // number)
    shared = (len(sizes) - 1) // number + 1
    return max(mean, *(sums[k * number + 1] - sums[k * number - k] for k in range(shared)))


def _largest_first(sizes: Sequence[int], number: int) -> Groups:
    groups: Groups = [[] for _ in range(number)]
    heap = [(0, group) for group in range(number)]
    for index, size in enumerate(sizes):
        load, group = heap[0]
        groups[group].append(index)
        heapq.heapreplace(heap, (load + size, group))
    return groups


def _first_fit(sizes: Sequence[int], number: int, capacity: int) -> Groups | None:
    groups: Groups = [[] for _ in range(number)]
    room = [capacity] * number
    for index, size in enumerate(sizes):
        group = next((g for g in range(number) if room[g] >= size), None)
        if group is None:
            return None
        groups[group].append(index)
        room[group] -= size
    return groups


def _search(sizes: Sequence[int], number: int, capacity: int) -> Groups | None:
    """A packing within the capacity, looked for depth first, the fullest group first.

    None if there is none, or none among the first PACKINGS_TRIED partial packings.
    """
    spare = number * capacity - sum(sizes)
    # Partial packings: how many sizes are placed, and (load, members) of each group by load.
    empty: tuple[int, tuple[int, ...]] = (0, ())
    stack = [(0, [empty] * number)]
    seen: set[tuple[int, ...]] = set()
    for _ in range(PACKINGS_TRIED):
        if not stack:
            return None
        placed, groups = stack.pop()
        if placed == len(sizes):
            return [list(members) for _, members in groups]
        size = sizes[placed]
        for position, (load, members) in enumerate(groups):
            twin = position > 0 and groups[position - 1][0] == load
            if twin or load + size > capacity:
                continue
            grown = (load + size, (*members, placed))
            after = sorted([*groups[:position], grown, *groups[position + 1 :]])
            # Room that is too small for every size is lost, and only `spare` may be.
            lost = sum(capacity - load for load, _ in after if capacity - load < sizes[-1])
            key = (placed, *(load for load, _ in after))
            if lost <= spare and key not in seen:
                seen.add(key)
                stack.append((placed + 1, after))
    return None
