"""Compilation of the C sources, with a cache of the result.

The compiled file lies in a folder of the user's own, under a name made from the source, the compiler and the processor.
A file or folder that others could have written to is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

NAMES = ("cpu", "layers", "attention", "sequences", "linear", "outer", "decoding")
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in NAMES)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "tiles.h", "rows.h"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-semantic-interposition")
LIMIT_S = 120.0  # limit of one compilation, which takes a few seconds


class Unavailable(RuntimeError):
    """There are no compiled kernels here. The message, for the user, says why."""


def find_compiler() -> str:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C compiler was found ({', '.join(COMPILERS)})")
    return compiler


def variants() -> list[tuple[str, ...]]:
    """Flags to try, the fastest first."""
    arm = platform.machine() in ("arm64", "aarch64")
    machine = ("-mcpu=native",) if arm else ("-march=native", "-mprefer-vector-width=512")
    return [(*machine, "-fopenmp"), machine, ()]


def compiled(compiler: str, extra: tuple[str, ...]) -> ctypes.CDLL:
    """The library for these flags, compiled if it is not cached. Raises Unavailable and OSError."""
    flags = (*FLAGS, *extra)
    path = _folder() / f"kernels-{_digest(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    _expect_ours(path)
    return _open(path)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    version = _output([compiler, "--version"])
    sources = (source.read_text() for source in (*HEADERS, *SOURCES))
    parts = (*sources, version, *flags, platform.machine(), _features())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _features() -> str:
    """The processor's features: machines that share a home folder may need other code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _folder() -> Path:
    """The cache folder, made if it is missing, which only this user may write to."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "tidemill"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _expect_ours(folder)
    return folder


def _expect_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{path} could have been written to by others: remove it, or mend its owner and permissions")


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile and link the sources without the compiler's OpenMP: see `_open`."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as place:
        made, linked = [Path(place) / f"{source.stem}.o" for source in SOURCES], Path(place) / "kernels.so"
        for source, to in zip(SOURCES, made, strict=True):
            _output([compiler, *flags, "-I", str(HEADERS[0].parent), "-c", str(source), "-o", str(to)])
        _output([compiler, "-shared", *map(str, made), "-o", str(linked), "-lm"])
        os.chmod(linked, 0o700)
        os.replace(linked, path)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {LIMIT_S:g} s") from None
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise Unavailable(f"{command[0]} failed: {first}")
    return done.stdout


def _open(path: Path) -> ctypes.CDLL:
    """Load the library with PyTorch's OpenMP threads: two thread pools would compete for the cores."""
    for threads in Path(torch.__file__).with_name("lib").glob("libgomp*"):
        ctypes.CDLL(str(threads), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))
