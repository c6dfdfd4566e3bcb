"""For programs that start training scripts: restarts, and why the script's worker left.

`diloco-worker run` and `diloco-launch local` share it. Nothing here imports torch.
"""

from diloco_worker.session.restarts import INTERRUPTED, RUN_IS_OVER, TERMINATED, Restarts, meant
from diloco_worker.transport.end_file import VARIABLE as END_FILE
from diloco_worker.transport.end_file import forget, word
from diloco_worker.transport.training_program import code_of

__all__ = [
    "END_FILE",
    "INTERRUPTED",
    "RUN_IS_OVER",
    "TERMINATED",
    "Restarts",
    "code_of",
    "forget",
    "meant",
    "word",
]
