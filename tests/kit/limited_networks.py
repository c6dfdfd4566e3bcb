"""Networks of the kernel with limited rates, or the reason why a test that needs one is skipped."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from diloco_lab.network.namespaces import Network, NoNetwork, network


@contextmanager
def network_or_skip(members: Any, **options: Any) -> Iterator[Network]:
    """`network`; the test is skipped where this machine has none."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(members, **options))
        except NoNetwork as error:
            pytest.skip(str(error))
        yield made
