"""Compile the kernels (protocol/diloco_protocol/kernels/kernels.c) into the wheel.

Without a C compiler the wheel is pure Python, and torch does their work. `CC` and `CFLAGS` are honored.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "protocol/diloco_protocol/kernels"
# Nothing may change a bit: no contraction. The others only say that no code reads errno or traps.
FLAGS = "-O3 -std=c11 -shared -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math"
# What the kernels ask of a processor; `kernels.ready` looks for it.
X86_FLAGS = "-mavx2 -mfma -mf16c"


class KernelsHook(BuildHookInterface[Any]):
    """Builds the library beside its source, and names the wheel for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, KERNELS, "kernels.c")
        library = source.with_name("kernels.so")
        fault = compile_kernels(source, library)
        if fault:
            self.app.display_warning(f"Without compiled kernels, torch does their work: {fault}")
            return
        build_data["artifacts"].append(f"{KERNELS}/{library.name}")
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"  # called by ctypes: it fits every Python


def compile_kernels(source: Path, library: Path) -> str | None:
    """Build the library, or remove an old one. Returns why there is none."""
    try:
        fault = _compile(source, library)
        if fault:
            library.unlink(missing_ok=True)
    except OSError as error:
        fault = str(error)
    return fault


def _compile(source: Path, library: Path) -> str | None:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if sys.platform == "win32" or not compiler or shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = shlex.split(f"{FLAGS} {X86_FLAGS if is_x86 else ''} {os.environ.get('CFLAGS', '')}")
    digest = hashlib.blake2b(source.read_bytes(), digest_size=8).hexdigest()
    flags.append(f'-DSOURCE_DIGEST="{digest}"')  # `kernels.load` compares it
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".kernels-") as folder:
        made = Path(folder, library.name)
        done = subprocess.run(
            [*compiler, *flags, str(source), "-o", str(made), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return done.stderr.strip().partition("\n")[0] or f"{compiler[0]} failed"
        made.replace(library)  # a running process may have the old one mapped
    return None
