"""Compiled kernels: they are there where there is a compiler, agree with NumPy, and are not used when they may not be."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tidemill.models.kernels import library
from tidemill.models.kernels.cpu import compilation
from tidemill.models.kernels.cpu.bindings import FLOATS, PAIRED, TILED, WIDENED, Native
from tidemill.models.kernels.cpu.compilation import COMPILERS, Unavailable
from tidemill.models.kernels.cpu.cpu_check import expect_right
from tidemill.models.kernels.library import SWITCH, gpu, native, why_not, why_not_gpu

SOURCES = compilation.SOURCES
COMPILER = next((name for name in COMPILERS if shutil.which(name)), None)
NATIVE = ("-march=native",) if platform.machine() == "x86_64" else ()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], str]:
    """`building._output`, which compiles a source once with the same flags: most tests change one source, or none."""
    output, known = compilation._output, tmp_path_factory.mktemp("objects")

    def compile_once(command: list[str]) -> str:
        if "-c" not in command:
            return output(command)
        source, made = Path(command[command.index("-c") + 1]), Path(command[-1])
        flags = (*command[: command.index("-c")], source.name, source.read_text())
        kept = known / f"{hashlib.blake2b(repr(flags).encode(), digest_size=12).hexdigest()}.o"
        said = "" if kept.exists() else output([*command[:-1], str(kept)])
        shutil.copy(kept, made)
        return said

    return compile_once


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: Callable[[list[str]], str]) -> Path:
    """An empty cache of compiled libraries, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation, "variants", lambda: [("-O1", *NATIVE)])  # quick to compile
    monkeypatch.setattr(compilation, "_output", objects)
    library._found.cache_clear()
    yield tmp_path / "tidemill"
    library._found.cache_clear()


@needs_compiler
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert os.environ.get(SWITCH) == "off" or (native() is not None and why_not() == "")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 8, 16])
def test_vectors_of_any_width_compute_the_same(width, cache, monkeypatch) -> None:
    """Those of other processors as well as this one's, which every other test has."""
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, f"-DWIDTH={width}"))
    assert native() is not None, why_not()


def test_a_trainer_that_computes_in_bfloat16_may_be_the_first_to_ask(kernels: Native) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect_right(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_touches_its_places_and_no_other(kernels: Native, dtype) -> None:
    pages = torch.randn(5, 2, 16, 64).to(dtype)
    before, heads = pages.clone(), torch.randn(3, 7, 32).to(dtype)
    k, v = heads[:, 1:3], heads[:, 4:6]
    kernels.write(pages, k, v, np.array([17, 0, 79]))
    for row, (page, offset) in enumerate([(1, 1), (0, 0), (4, 15)]):
        assert torch.equal(pages[page, :, offset], torch.cat((k[row], v[row]), dim=-1))
        before[page, :, offset] = pages[page, :, offset]
    assert torch.equal(pages, before)


@pytest.mark.parametrize(
    "given",
    [
        (torch.float16, 4, 2, 32, 16),
        (torch.float32, 4, 2, 80, 16),
        (torch.float32, 4, 2, 8, 16),
        (torch.float32, 32, 1, 32, 16),
        (torch.float32, 4, 2, 32, 8),
    ],
)
def test_what_they_are_not_for(given) -> None:
    assert not Native.attends(*given)


def test_the_switch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert native() is None and SWITCH in why_not() and not cache.exists()


def test_without_a_compiler_it_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    assert native() is None and "no C compiler" in why_not()


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    assert native() is None and str(cache) in why_not()


@needs_compiler
def test_a_compiler_that_fails_is_quoted(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cpu.c"
    broken.write_text("this is no C;")
    monkeypatch.setattr(compilation, "SOURCES", (broken, *SOURCES[1:]))
    assert native() is None and "error" in why_not()
    assert not list(cache.glob("*")), "something was left"


@needs_compiler
@pytest.mark.runs
def test_it_is_compiled_once_and_privately(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native() is not None, why_not()
    (made,) = cache.iterdir()
    assert made.stat().st_mode & 0o077 == 0 and cache.stat().st_mode & 0o077 == 0
    library._found.cache_clear()
    monkeypatch.setattr(compilation, "_compile", None)
    assert native() is not None


@pytest.mark.parametrize(
    ("switch", "device", "made", "right", "reason"),
    [
        ("off", True, object, True, "switched off"),
        ("", False, object, True, "no CUDA device"),
        ("", True, lambda: 1 // 0, True, "ZeroDivisionError"),
        ("", True, object, False, "something else"),
        ("", True, object, True, ""),
    ],
)
def test_kernels_for_a_device_are_used_where_nothing_is_amiss(
    switch: str, device: bool, made: Callable[[], object], right: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        def __init__(self) -> None:
            made()

    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setattr(library, "Gpu", Kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(library.cuda_check, "right", lambda kernels, on: right and on.type == "cuda")
    library._found_gpu.cache_clear()
    try:
        assert (gpu() is None) == bool(reason) and reason in why_not_gpu() and bool(why_not_gpu()) == bool(reason)
    finally:
        library._found_gpu.cache_clear()


@needs_compiler
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_could_have_written_is_not_loaded(cache: Path, what: str) -> None:
    assert native() is not None, why_not()
    library._found.cache_clear()
    path = next(cache.iterdir()) if what == "file" else cache
    path.chmod(0o722)
    assert native() is None and "written to by others" in why_not() and str(path) in why_not()


WRONG = [
    ("before + sum;", "before + 2 * sum;"),
    ("page++;", "page += 2;"),
    ("_tile_dpbf16ps(t, 4, 6);", ""),
    ("memcpy(to + bytes,", "memcpy(to,"),
    ("total += sums[r] * *factors++", "total += sums[r]"),
    ("        at += runs * count;", "        at += count;"),
    ("x[i] *= weight[i];", "x[i] *= 1;"),
    ("turned[i] = wide[i] * c[i] - ", "turned[i] = wide[i] * c[i] + "),
    ("back[i] = d[i] * c[i] + ", "back[i] = d[i] * c[i] - "),
    ("along *= scale * scale / (float)size;", "along *= scale / (float)size;"),
    ("sums[i] += d[i] * x[i] * scale;", "sums[i] += d[i] * x[i];"),
    ("* sigmoid(gates[i], &lacks) * ups[i]", "* ups[i]"),
    ("(1.0f + gate * lacks)", "(1.0f + gate)"),
    ("return sum + word", "return sum + 1"),
    ("+ v] += weights[v] * factor", "+ v] += weights[0] * factor"),
    ("_mm512_dpbf16_ps(sums[r][1], high, factor)", "_mm512_dpbf16_ps(sums[r][1], low, factor)"),
    ("next[v] = (vec)(both & (int32_t)0xffff0000)", "next[v] = (vec)both"),
    ("load((char *)x + i * width, narrow) + ", ""),
    ("turned + q_heads * head", "turned"),
    ("memcpy(&square[r], from, sizeof(ints))", "memcpy(&square[r], from, sizeof(ints) - 4)"),
]  # (in the source, in its place)


@needs_compiler
@pytest.mark.parametrize(
    "right, wrong", [pytest.param(*each, marks=[pytest.mark.slow] if n % 4 else []) for n, each in enumerate(WRONG)]
)
@pytest.mark.runs
def test_a_library_that_computes_something_else_is_not_used(cache, tmp_path, monkeypatch, right, wrong) -> None:
    ways = {
        "square": FLOATS,
        "width": FLOATS,
        "q_heads * head": FLOATS,
        "weights[v] * factor": FLOATS,
        "tile": TILED,
        "dpbf16_ps": PAIRED,
        "next[v]": WIDENED,
    }
    if way := next((way for words, way in ways.items() if words in right), None):
        found = native()
        assert found is not None
        if way not in found.products.values():
            pytest.skip("no packed products on this processor")
        library._found.cache_clear()
    (source,) = [source for source in SOURCES if right in source.read_text()]
    changed = tmp_path / source.name
    assert source.read_text().count(right) == 1
    changed.write_text(source.read_text().replace(right, wrong))
    monkeypatch.setattr(compilation, "SOURCES", tuple(changed if each == source else each for each in SOURCES))
    assert native() is None and "something else" in why_not()


@needs_compiler
@pytest.mark.runs
def test_loading_starts_no_thread() -> None:
    """A process that is forked from may not have any."""
    code = (
        "import os, torch; before = len(os.listdir('/proc/self/task'))\n"
        "from tidemill.models.kernels.library import native\n"
        "assert native() is not None; assert len(os.listdir('/proc/self/task')) == before"
    )
    if not os.path.exists("/proc/self/task"):
        pytest.skip("no /proc")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_says_what_is_wrong_in_one_line() -> None:
    with pytest.raises(Unavailable, match="failed: no such option"):
        compilation._output([sys.executable, "-c", "import sys; sys.exit('no such option')"])
