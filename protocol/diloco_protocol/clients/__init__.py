"""Clients that send requests to a broker without joining its run.

Import `observer`, which reads a run's model, by its own name: it needs torch, which slows the start of
displays.
"""

from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.clients.operator import Answer, Ask, Operator, ask_once

__all__ = ["Answer", "Ask", "Keys", "Operator", "ask_once", "find_keys"]
