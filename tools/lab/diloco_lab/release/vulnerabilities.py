"""Has anything that is installed a known vulnerability? `pip-audit` says so, if it reaches its data.

A finding fails. Data that cannot be reached is said and no failure: otherwise nobody could lint
without a network. Nothing leaves this machine but names and versions of packages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

OURS = "diloco-broker"
PIP_AUDIT = (sys.executable, "-m", "pip_audit")
# For one package, and for all of them, seconds: a network that swallows everything must not stop lint.
ONE_WITHIN_S = 5
ALL_WITHIN_S = 60.0
# The exit codes of pip-audit with which it has something to say; 2 is wrong usage.
SAYS = (0, 1)
# What it and requests say where an answer does not come, or is an error of the server.
_OF_THE_NETWORK = re.compile(
    r"connect|network|time(d )?out|HTTPError|SSLError|ProxyError", re.IGNORECASE
)


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Attributes:
        text: to be printed.
        is_bad: something was found, or pip-audit is not there or does not do what it is told.
    """

    text: str
    is_bad: bool = False


def look(command: Sequence[str] = PIP_AUDIT, within_s: float = ALL_WITHIN_S) -> Verdict:
    """Ask about every package that is installed for this Python."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "installed.txt")
        listed.write_text("\n".join(pinned(distributions())) + "\n")
        options = ["--requirement", str(listed), "--no-deps", "--disable-pip", "--format", "json"]
        options += ["--desc", "off", "--progress-spinner", "off", "--timeout", str(ONE_WITHIN_S)]
        try:
            ended = subprocess.run(
                [*command, *options], capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired:
            return _skipped(f"no answer for {within_s:g} s")
        except OSError as error:
            return Verdict(f"pip-audit cannot be run: {error}. Run: make setup", is_bad=True)
    return verdict(ended.returncode, ended.stdout, ended.stderr)


def pinned(installed: Iterable[Distribution]) -> list[str]:
    """Name and version of each, in the form of a requirement; without us, whom no database knows."""
    found = {each.metadata["Name"]: each.version for each in installed}
    found.pop(OURS, None)
    # What is left of a package that was half removed has neither.
    found = {name: version for name, version in found.items() if name and version}
    # A build for one kind of machine (2.13.0+cpu) has the vulnerabilities of its release.
    return sorted(f"{name}=={version.partition('+')[0]}" for name, version in found.items())


def verdict(code: int, stdout: str, stderr: str) -> Verdict:
    """What the end of pip-audit means. See the head of this module."""
    last = (stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
    if code not in SAYS or "No module named" in last:
        return Verdict(f"pip-audit failed: {last}. Run: make setup", is_bad=True)
    try:
        packages: list[dict[str, Any]] = json.loads(stdout)["dependencies"]
    except (
        ValueError,
        KeyError,
        TypeError,
    ):  # it ends so when a connection fails, and when it crashes
        # Of a traceback what was raised, not where; pip-audit's warnings have addresses in them.
        said = [each for each in stderr.splitlines() if not each.startswith((" ", "WARNING:"))]
        if _OF_THE_NETWORK.search("\n".join(said)):
            return _skipped(last)
        return Verdict(f"pip-audit failed: {last}. Run: make setup", is_bad=True)
    bad = [each for each in packages if each.get("vulns")]
    if bad:
        return Verdict("\n".join(map(_finding, bad)), is_bad=True)
    unknown = [each for each in packages if "skip_reason" in each]
    known = len(packages) - len(unknown)
    if not known:
        why = unknown[0]["skip_reason"] if unknown else "it was told of no package"
        return _skipped(f"{why}; so it is with all {len(packages)} packages")
    text = f"pip-audit: nothing is known against {known} packages."
    if unknown:
        text += " Not to be found there: " + ", ".join(each["name"] for each in unknown) + "."
    return Verdict(text)


def _skipped(why: str) -> Verdict:
    return Verdict(f"pip-audit was skipped, since its data cannot be reached: {why}")


def _finding(package: dict[str, Any]) -> str:
    said = []
    for each in package["vulns"]:
        names = ", ".join([each["id"], *each.get("aliases", ())])
        fixed = " or ".join(each.get("fix_versions", ())) or "no release yet"
        said.append(f"{names} (mended in {fixed})")
    return f"pip-audit: {package['name']} {package['version']} has {'; '.join(said)}"


if __name__ == "__main__":
    found = look()
    print(found.text)
    sys.exit(found.is_bad)
