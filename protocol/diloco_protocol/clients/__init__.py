"""What asks a broker over a socket without taking part in its run."""

from diloco_protocol.clients.operator import Answer, Ask, Operator, ask_once

__all__ = ["Answer", "Ask", "Operator", "ask_once"]
