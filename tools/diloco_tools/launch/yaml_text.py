"""Files for other programs as YAML that people can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diloco_protocol.errors import UsageError

WIDTH = 110


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """The documents, each with its `---`: scripts as literal blocks, and no references.

    Raises UsageError if PyYAML is missing.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            'PyYAML is missing: install it with pip install "diloco-broker[kubernetes]".'
        ) from None

    class Readable(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text_of(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Readable.add_representer(str, text_of)
    return str(
        yaml.dump_all(documents, Dumper=Readable, sort_keys=False, explicit_start=True, width=WIDTH)
    )
