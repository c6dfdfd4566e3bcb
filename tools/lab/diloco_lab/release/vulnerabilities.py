"""Asks `pip-audit` for known vulnerabilities of the installed packages.

A finding fails. Unreachable data is reported and does not fail, so that linting works without a network.
Only names and versions of packages leave this machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

OURS = "diloco-broker"
PIP_AUDIT = (sys.executable, "-m", "pip_audit")
# Seconds for one package, and for all of them: a network without answers must not block lint.
ONE_WITHIN_S = 5
ALL_WITHIN_S = 60.0
# Errors of it and of requests without an answer, or with an error of the server.
_OF_THE_NETWORK = re.compile(
    r"connect|network|time(d )?out|HTTPError|SSLError|ProxyError", re.IGNORECASE
)


def look(command: Sequence[str] = PIP_AUDIT, within_s: float = ALL_WITHIN_S) -> tuple[bool, str]:
    """Ask about every package that is installed for this Python.

    Returns:
        False where something was found, or pip-audit failed for another reason than the network; and
        the text to print.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "installed.txt")
        packages = pinned(distributions())
        listed.write_text("\n".join(packages) + "\n")
        options = ["--requirement", str(listed), "--no-deps", "--disable-pip", "--desc", "off"]
        options += ["--progress-spinner", "off", "--timeout", str(ONE_WITHIN_S)]
        try:
            ended = subprocess.run(
                [*command, *options], capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired:
            return True, f"pip-audit was skipped: no answer for {within_s:g} s"
        except OSError as error:
            return False, f"pip-audit cannot be run: {error}. Run: make setup"
    last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
    if ended.returncode == 0:
        unknown = ended.stdout.count("could not be audited")
        known = f"{len(packages) - unknown} of {len(packages)} packages were found there"
        return True, f"pip-audit: {last}; {known}"
    if ended.returncode == 1 and ended.stdout.strip():
        return False, f"pip-audit: {last}\n{ended.stdout.strip()}"
    # The error of a traceback, without its places; pip-audit's warnings contain addresses.
    said = [line for line in ended.stderr.splitlines() if not line.startswith((" ", "WARNING:"))]
    if ended.returncode == 1 and _OF_THE_NETWORK.search("\n".join(said)):
        return True, f"pip-audit was skipped, since its data cannot be reached: {last}"
    return False, f"pip-audit failed: {last}. Run: make setup"


def pinned(installed: Iterable[Distribution]) -> list[str]:
    """Name and version of each, in the form of a requirement, without our own packages."""
    found = {each.metadata["Name"]: each.version for each in installed}
    found.pop(OURS, None)
    # The rest of an incompletely removed package has neither.
    found = {name: version for name, version in found.items() if name and version}
    # A build for one kind of machine (2.13.0+cpu) has the vulnerabilities of its release.
    return sorted(f"{name}=={version.partition('+')[0]}" for name, version in found.items())


if __name__ == "__main__":
    is_sound, text = look()
    print(text)
    sys.exit(not is_sound)
