"""What is printed for people by way of Rich: text as it is, and styles only where `Text` asks for them.

Rich takes what stands in square brackets for its markup, and words between colons for emoji. Folders,
workers and the names of extras have both, so nothing here reads either.
"""

from typing import Any

from rich.console import Console


def console(**options: Any) -> Console:
    """A console, with the `options` of Rich, that prints each string as it is."""
    return Console(markup=False, emoji=False, highlight=False, **options)
