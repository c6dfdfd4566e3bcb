"""What several tests of the tools use: a feed without a broker, a full screen without a terminal."""

from collections.abc import Iterator
from contextlib import closing
from inspect import iscoroutinefunction, signature

import pytest

from kit.dashboard_server import Publisher
from kit.top_screen import ScreenPilot


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with closing(Publisher()) as made:
        yield made


@pytest.fixture
def pilot(request: pytest.FixtureRequest) -> ScreenPilot:
    """The screen that an async test is a script for; `both` and `screen` say which."""
    return ScreenPilot(**getattr(request, "param", {}))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run an async test as the script of its `pilot`."""
    if not iscoroutinefunction(pyfuncitem.function):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    pilot = pyfuncitem.funcargs["pilot"]
    assert isinstance(pilot, ScreenPilot)
    pilot.play(lambda: pyfuncitem.obj(**given))
    return True
