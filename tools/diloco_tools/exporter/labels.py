"""Label values from what strangers call themselves: short, printable, bounded in number.

Every distinct label value is a time series that Prometheus keeps for weeks, and two series with the
same labels make it refuse the whole scrape. Worker ids are free text of the peers.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2s

LONGEST_VALUE = 64  # characters
HELD_S = 600.0  # a place is kept for a worker that is gone before another one gets it


def label_value(text: str) -> str:
    """`text` itself if it is short and printable, else its beginning and a digest of the whole."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text[:LONGEST_VALUE])
    if clean == text:
        return text
    digest = blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean[: LONGEST_VALUE - 9]}~{digest}"


class Places:
    """Which workers have series of their own: at most `most` at a time, the first to come.

    A worker keeps its place, and its label, while it is there. Once it is gone its place is held for
    ten minutes, so that workers that come and go under ever new names cannot fill Prometheus with
    series.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._labels: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def take(self, ids: Iterable[str], now: float) -> Mapping[str, str]:
        """Worker id -> label value, of those of `ids` that have a place at `now` (seconds)."""
        here = list(dict.fromkeys(ids))
        for gone in [name for name, seen in self._seen.items() if now - seen > HELD_S]:
            del self._seen[gone], self._labels[gone]
        for name in here:
            label = label_value(name)
            # Of two ids that look the same, one has series.
            is_free = len(self._labels) < self.most and label not in self._labels.values()
            if name in self._labels or is_free:
                self._labels[name] = label
                self._seen[name] = now
        return {name: self._labels[name] for name in here if name in self._labels}
