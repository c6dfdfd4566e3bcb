"""Workers at the core that send heartbeats, while they train or stand still."""

from kit.core_harness import Stage


class Beating:
    """Workers that send heartbeats every 10 s; those that train make a step in between."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.steps: dict[str, int] = {}

    def goes_on(self, seconds: float, **states: str) -> None:
        """`a="training"` trains, `b="standing"` says that it does; other states are told as such."""
        for _ in range(round(seconds / 10)):
            self.stage.passes(10.0)
            for name, state in states.items():
                self.beats(name, state)

    def beats(self, name: str, state: str = "training") -> None:
        self.steps[name] = self.steps.get(name, 0) + (state == "training")
        said = "training" if state == "standing" else state
        self.stage.puppets[name].beats(self.steps[name], said)
