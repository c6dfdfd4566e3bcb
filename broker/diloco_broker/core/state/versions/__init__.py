"""The versions that are handed out, and those who read them: `store` is where to begin."""

from diloco_broker.core.state.versions.fragment import (
    OLD_VERSIONS_KEPT,
    TAGS_KEPT,
    TAGS_SAVED,
    FragmentVersions,
    WholeVersion,
)
from diloco_broker.core.state.versions.readers import (
    MAX_OBSERVER_CREDIT,
    MAX_OBSERVERS,
    MAX_READER_CREDIT,
    OBSERVER_GOES_ON_WITHIN_S,
    WORKER_GOES_ON_WITHIN_S,
    Reader,
    lane_credit,
)
from diloco_broker.core.state.versions.store import VersionStore

__all__ = [
    "MAX_OBSERVERS",
    "MAX_OBSERVER_CREDIT",
    "MAX_READER_CREDIT",
    "OBSERVER_GOES_ON_WITHIN_S",
    "OLD_VERSIONS_KEPT",
    "TAGS_KEPT",
    "TAGS_SAVED",
    "WORKER_GOES_ON_WITHIN_S",
    "FragmentVersions",
    "Reader",
    "VersionStore",
    "WholeVersion",
    "lane_credit",
]
