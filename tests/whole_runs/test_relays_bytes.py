"""The line between a site and its hub carries one push and one version a round, for all its workers."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from diloco_tools.tcp_proxy import Gate, TcpProxy
from kit.sites import Sites

WIDTH = 512  # 262,144 parameters


class CountingProxy(TcpProxy):
    """Counts the bytes that pass, by direction."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.bytes: Counter[bool] = Counter()  # by whether it is up

    def gate(self, connection: int, up: bool) -> Gate:
        def gate(data: bytes) -> tuple[bytes, bool]:
            self.bytes[up] += len(data)
            return data, False

        return gate


def wide() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def bits_of_a_round(*, is_deep: bool = False, **of_hub: Any) -> tuple[float, float]:
    """Bits of a parameter, up and down, on the line between a site of three workers and its hub."""
    rounds = range(1, 4)
    with Sites(wide) as sites:
        hub = sites.hub(3, **of_hub)
        with CountingProxy(hub.address) as line:
            north = sites.relay(line.address, "north")
            sites.workers(north, "a")
            sites.workers(sites.relay(north, "deep") if is_deep else north, "b", "c")
            sites.rounds(range(1), "a", "b", "c")
            before = line.bytes.copy()
            sites.rounds(rounds, "a", "b", "c")
            spent = {up: line.bytes[up] - before[up] for up in (True, False)}
            north.stop()
    each = len(rounds) * WIDTH * WIDTH / 8
    return spent[True] / each, spent[False] / each


# int4z takes 1.9 to 2.2 bits in training, and about 2.2 of normal values with all that is said.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "reply", "up", "down"),
    [("bf16", "fp32", (16, 16.5), (32, 32.5)), ("int4z", "int4z", (1.8, 2.3), (1.8, 2.3))],
    ids=["bf16 and fp32", "int4z"],
)
@pytest.mark.parametrize("is_deep", [False, True], ids=["streaming", "relay behind it, in order"])
def test_line_of_a_site_carries_one_push_and_one_version_a_round(
    wire: str, reply: str, up: tuple[float, float], down: tuple[float, float], is_deep: bool
) -> None:
    bits = bits_of_a_round(
        is_deep=is_deep, deterministic=is_deep, wire_dtype=wire, reply_dtype=reply
    )
    for found, (least, most) in zip(bits, (up, down), strict=True):
        assert least <= found < most


@pytest.mark.slow
def test_each_push_goes_over_the_line_where_the_hub_needs_each_by_itself() -> None:
    up, down = bits_of_a_round(aggregate="coordinate-median", wire_dtype="bf16", reply_dtype="fp32")
    assert 3 * 16 <= up < 3 * 16.5
    assert 32 <= down < 32.5
