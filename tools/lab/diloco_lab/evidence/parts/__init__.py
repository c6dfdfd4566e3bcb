"""The parts of the evidence, in the order of the page."""

from diloco_lab.evidence.claim import Part
from diloco_lab.evidence.parts.alone import LOCAL, MULOCO
from diloco_lab.evidence.parts.asynchronous import ASYNCHRONOUS, CGAD, DYLU
from diloco_lab.evidence.parts.communication import CODECS, FRAGMENTS, TRAFFIC
from diloco_lab.evidence.parts.failures import LOSSES, POISON
from diloco_lab.evidence.parts.finetune import FINETUNE
from diloco_lab.evidence.parts.frontier import FRONTIER
from diloco_lab.evidence.parts.rounds import DATA_PARALLEL, RDA, SCHEDULES, SYNC_EVERY, WORKERS

_ROUNDS = (WORKERS, RDA, DATA_PARALLEL, SYNC_EVERY, SCHEDULES)
_OTHERS = (ASYNCHRONOUS, CGAD, DYLU, LOSSES, FRAGMENTS, CODECS, POISON, TRAFFIC)
_NEWEST = (LOCAL, MULOCO, FINETUNE, FRONTIER)
PARTS: dict[str, Part] = {part.name: part for part in (*_ROUNDS, *_OTHERS, *_NEWEST)}
