"""What asks a broker over a socket without taking part in its run.

`observer`, which reads a run's model, is imported by its own name: it needs torch, and a display starts
sooner without.
"""

from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.clients.operator import Answer, Ask, Operator, ask_once

__all__ = ["Answer", "Ask", "Keys", "Operator", "ask_once", "find_keys"]
