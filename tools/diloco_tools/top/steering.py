"""Asking the broker for something: the control address, and one request with its answer.

A request opens a connection of its own and may take seconds: callers run it in a thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_protocol.clients.operator import Operator
from diloco_protocol.errors import DilocoError

EVERYWHERE = ("*", "0.0.0.0", "[::]", "[::0]")  # what a socket is bound to, and nobody connects to
PATIENCE_S = 5.0  # for an answer: a broker in the longest turn of its loop is back long before


@dataclass(frozen=True)
class Answer:
    """What came of a request, in a sentence; not `ok`: refused, or nobody there."""

    ok: bool
    text: str


# address, action, arguments -> what came of it
Ask = Callable[[str, str, Mapping[str, object]], Answer]


def ask_broker(
    address: str, action: str, arguments: Mapping[str, object], *, patience_s: float = PATIENCE_S
) -> Answer:
    """Send one request and wait for its answer; a refusal and silence are answers, too."""
    try:
        with Operator(address, timeout=patience_s) as operator:
            result = operator.ask(action, **arguments)
    except DilocoError as error:
        return Answer(False, str(error))
    return Answer(result.ok, result.text)


def control_address(control: str, feed: str) -> str:
    """Where to send requests: what the feed names, on the feed's host if the broker is bound to all."""
    scheme, separator, rest = control.partition("://")
    host, colon, port = rest.rpartition(":")
    if not (separator and colon) or host not in EVERYWHERE:
        return control
    feed_host = feed.partition("://")[2].rpartition(":")[0] if feed.startswith("tcp://") else ""
    return f"{scheme}://{feed_host or '127.0.0.1'}:{port}"
