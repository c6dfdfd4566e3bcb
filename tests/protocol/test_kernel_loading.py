"""Kernels that cannot be loaded: torch does their work, and one log line says why."""

import importlib.util
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_protocol import kernels
from diloco_protocol.tensors.codecs import BLOCKS
from kit.kernel_paths import SWITCH, needs_kernels
from kit.paths import ROOT

SOURCE = Path(kernels.__file__).with_name("kernels.c")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
_spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert _spec is not None and _spec.loader is not None
hatch_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hatch_build)


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SWITCH, raising=False)
    for each in (kernels.ready, kernels.load):
        each.cache_clear()
    yield
    for each in (kernels.ready, kernels.load):
        each.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copy(SOURCE, tmp_path))


@pytest.mark.parametrize("contents", [None, b"", b"\x7fELF of another machine"])
def test_missing_or_broken_library_falls_back_to_torch_with_one_log_line(
    contents: bytes | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = tmp_path / "kernels.so"
    if contents is not None:
        library.write_bytes(contents)
    monkeypatch.setattr(kernels, "LIBRARY", library)
    with caplog.at_level(logging.INFO, "diloco.kernels"):
        for _ in range(3):
            assert kernels.ready() is None
            assert BLOCKS["int4"].encode(torch.full((300,), 7.0)).read().tolist() == [7.0] * 300
    (line,) = caplog.messages
    assert "torch" in line
    assert ("compiler" if contents is None else "kernels.so") in line


@needs_kernels
def test_processor_without_avx2_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert kernels.ready() is None


@needs_compiler
def test_library_of_other_sources_is_not_used(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = source.with_name("kernels.so")
    monkeypatch.setenv("CFLAGS", "-O0")  # no kernel runs, and optimizing them takes seconds
    assert hatch_build.compile_kernels(source, library) is None
    monkeypatch.setattr(kernels, "LIBRARY", library)
    source.write_text(source.read_text() + "/* one more function */")
    with caplog.at_level(logging.INFO, "diloco.kernels"):
        assert kernels.ready() is None
    assert "other sources" in caplog.text


@needs_kernels
def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.ready() is not None
    monkeypatch.setenv(SWITCH, "torch")
    kernels.ready.cache_clear()
    assert kernels.ready() is None


def test_no_library_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = source.with_name("kernels.so")
    library.touch()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "compiler" in (hatch_build.compile_kernels(source, library) or "")
    assert not library.exists()


@needs_compiler
def test_build_goes_on_without_a_folder_or_a_source_that_compiles(source: Path) -> None:
    assert "nowhere" in (hatch_build.compile_kernels(source, source.parent / "nowhere" / "k") or "")
    source.write_text("int f( {")
    assert "kernels.c" in (hatch_build.compile_kernels(source, source.with_name("k.so")) or "")
    assert [each.name for each in source.parent.iterdir()] == ["kernels.c"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "gcc -Wall -Wextra -Werror", "clang -Wall -Werror"])
def test_built_kernels_agree(compiler: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler.split(maxsplit=1)[0]) is None:
        pytest.skip("not installed")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(kernels, "LIBRARY", source.with_name("kernels.so"))
    assert hatch_build.compile_kernels(source, kernels.LIBRARY) is None
    assert kernels.ready() is not None
