"""All objects of a run as one text, for `kubectl apply -f -` and for people."""

from __future__ import annotations

from typing import Any

from diloco_protocol.errors import UsageError
from diloco_tools.launch.kubernetes.broker_objects import broker_objects
from diloco_tools.launch.kubernetes.island_objects import island_objects
from diloco_tools.launch.kubernetes.run import KubernetesRun, Object

WIDTH = 110
HEAD = """\
# The run {name}: a broker and {islands}. Written by diloco-launch kubernetes.
# It has been checked against the schemas of Kubernetes, and not run on a cluster.
# It holds secret keys: give it to kubectl, and to nobody else.
"""


def objects_of(run: KubernetesRun) -> list[Object]:
    """The broker's, and those of each island."""
    islands = [each for number in range(run.islands) for each in island_objects(run, number)]
    return [*broker_objects(run), *islands]


def as_yaml(run: KubernetesRun) -> str:
    """One document an object.

    Raises UsageError where PyYAML is missing.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            'PyYAML is missing: install it with pip install "diloco-broker[kubernetes]".'
        ) from None

    class Readable(yaml.SafeDumper):
        """Scripts as they are, and everything where it belongs: no references."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text_of(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Readable.add_representer(str, text_of)
    islands = f"{run.islands} island{'s'[: run.islands != 1]}"
    text = yaml.dump_all(
        objects_of(run), Dumper=Readable, sort_keys=False, explicit_start=True, width=WIDTH
    )
    return HEAD.format(name=run.name, islands=islands) + str(text)
