"""Custom splits of a model in JSON files, which map names or patterns of names to fragments.

    {"model.embed_tokens.*": 0, "model.layers.?.*": 1, "model.layers.1?.*": 2, "lm_head.weight": 0}

Patterns are those of file names in a shell, and match the complete name including dots: `*` is any text,
`?` one character, `[0-5]` one of these. Exactly one pattern must match each trainable parameter, to
prevent mistakes (`layers.1*` also matches `layers.10`), and each pattern must match a parameter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from diloco_protocol.errors import UsageError
from diloco_protocol.fragments.plan import FragmentPlan, trainable_of
from diloco_protocol.manifest import Manifest, TensorEntry, summarise


@dataclass(frozen=True)
class OwnSplit:
    """The fragment of each pattern of names."""

    source: str  # its origin, for messages: "--fragment-plan plan.json"
    fragments: Mapping[str, int]  # by pattern

    @classmethod
    def from_json(cls, text: str, source: str) -> OwnSplit:
        """Parse a JSON object whose values are 0 to P - 1 without gaps; raises UsageError."""

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            counts = Counter(name for name, _ in pairs)
            twice = [name for name, count in counts.items() if count > 1]
            if twice:
                raise UsageError(
                    f"{source} has {summarise(twice)} more than once; keep one of each."
                )
            return dict(pairs)

        try:
            fragments = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source} is not JSON: {error!s:.200}.") from None
        example = '{"model.embed*": 0, "model.layers.*": 1}'
        if not isinstance(fragments, dict) or not fragments:
            raise UsageError(f"{source} must hold an object like {example}.")
        wrong = [
            f"{name!r:.80} has {number!r:.40}"
            for name, number in fragments.items()
            if type(number) is not int or number < 0
        ]
        if wrong:
            raise UsageError(
                f"{source}: fragments must be integers from 0 on, as in {example}; "
                f"{summarise(wrong)}."
            )
        highest = max(fragments.values())
        # If the highest is at least the number of patterns, a gap is below that number.
        gaps = sorted(set(range(min(highest, len(fragments)))) - {*fragments.values()})
        if gaps:
            raise UsageError(
                f"{source} has a fragment {highest} but no fragment "
                f"{summarise([str(number) for number in gaps])}; number them from 0 without gaps."
            )
        return cls(source, fragments)

    @property
    def num_fragments(self) -> int:
        """P."""
        return max(self.fragments.values()) + 1

    def plan(self, manifest: Manifest) -> FragmentPlan:
        """Split a model by these patterns.

        Raises UsageError that names the problem: a parameter without a matching pattern or with several,
        a pattern that matches no parameter, or a fragment without elements.
        """
        matching = {each.name: self._matching(each.name) for each in trainable_of(manifest)}
        missing = [name for name, patterns in matching.items() if not patterns]
        if missing:
            raise UsageError(
                f"{self.source} has no pattern for {len(missing)} trainable parameter(s): "
                f"{summarise(missing)}; give each a fragment."
            )
        twice = [
            f"{name} by {' and '.join(map(repr, patterns))}"
            for name, patterns in matching.items()
            if len(patterns) > 1
        ]
        if twice:
            raise UsageError(
                f"{self.source} matches {len(twice)} parameter(s) more than once: {summarise(twice)}; "
                "exactly one pattern must match each."
            )
        used = {pattern for patterns in matching.values() for pattern in patterns}
        idle = [
            f"{pattern!r}{self._why_idle(pattern, manifest.entries)}"
            for pattern in self.fragments
            if pattern not in used
        ]
        if idle:
            raise UsageError(
                f"{self.source} has {len(idle)} pattern(s) that match no trainable parameter: "
                f"{summarise(idle)}; correct or remove them."
            )
        return FragmentPlan.by(
            manifest, self.num_fragments, lambda name, _: self.fragments[matching[name][0]]
        )

    def _matching(self, name: str) -> list[str]:
        return [pattern for pattern in self.fragments if fnmatchcase(name, pattern)]

    @staticmethod
    def _why_idle(pattern: str, entries: tuple[TensorEntry, ...]) -> str:
        for entry in entries:
            if any(fnmatchcase(alias, pattern) for alias in entry.aliases):
                return f" (tied to {entry.name})"
            if fnmatchcase(entry.name, pattern):
                return f" ({entry.name} is a {entry.kind.value} tensor)"
        return ""
