"""Compiles the C++ sources for this processor, once, and loads them.

The library is a plain one with a C interface, called through `ctypes`: it is linked against
neither PyTorch nor Python, so that it outlives upgrades of both. It is kept in the user's cache
under a name made of its sources, the compiler and the flags.

    SUBQUAD_NATIVE=0    never use it
    SUBQUAD_CACHE       folder in place of $XDG_CACHE_HOME/subquad or ~/.cache/subquad
    CXX                 the compiler, instead of c++, g++ or clang++
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from subquad.errors import SubquadError

__all__ = ["Build", "build", "library", "reason", "reset"]

SOURCES = ("linear.cpp", "clusters.cpp", "held.cpp")
HEADERS = ("vectors.h", "threads.h", "rows.h")
COMMON = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=hidden",
)  # fmt: skip
X86 = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""By torch's name of what the processor can do. `-march=native` is slower with some compilers."""
VERSION = 1

_lock = threading.Lock()


@dataclass(frozen=True)
class Build:
    """A compiled library.

    Args:
        path: of the file.
        compiler: that made it.
        flags: it was given.
        fresh: it was made just now.
    """

    path: Path
    compiler: str
    flags: tuple[str, ...]
    fresh: bool


def capability() -> str:
    """What the processor has, in torch's words: "AVX512", "AVX2", "DEFAULT", ..."""
    return torch.backends.cpu.get_cpu_capability()


def _flags(version: str) -> tuple[str, ...]:
    """For a compiler that describes itself so."""
    threads = ("-fopenmp",) if "Free Software Foundation" in version and _has_gomp() else ()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return (*COMMON, *threads)  # vectors of 128 bits are part of every 64-bit ARM
    found = X86.get(capability(), ())
    return (*COMMON, *threads, *found, "-mtune=generic")


@functools.cache
def _has_gomp() -> bool:
    """Whether PyTorch runs on the OpenMP library that GCC links: then both share their threads."""
    with contextlib.suppress(OSError):
        return "/libgomp.so.1" in Path("/proc/self/maps").read_text()
    return False


@functools.cache
def _version(command: str) -> str:
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def cache_folder() -> Path:
    """Where libraries are kept."""
    if os.environ.get("SUBQUAD_CACHE"):
        return Path(os.environ["SUBQUAD_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "subquad"


def _name(command: str) -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in SOURCES + HEADERS:
        digest.update((here / source).read_bytes())
    version = _version(command)
    digest.update(repr((version, _flags(version), platform.machine())).encode())
    return f"native-{digest.hexdigest()[:16]}.so"


def build(*, force: bool = False) -> Build:
    """Compiles the library, or finds the one that was compiled before.

    Args:
        force: compile in any case.

    Raises:
        SubquadError: there is no compiler, or it fails; with its output.
    """
    command = compiler()
    if command is None:
        raise SubquadError(
            "no C++ compiler was found (c++, g++, clang++, or CXX); install one, such as the "
            "package g++"
        )
    try:
        name = _name(command)
    except (OSError, subprocess.SubprocessError) as error:
        raise SubquadError(f"{command} does not run: {error}") from None
    flags = _flags(_version(command))
    folder = cache_folder() / "native"
    path = folder / name
    if path.is_file() and not force:
        return Build(path, command, flags, False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            made = Path(part) / name
            sources = [str(Path(__file__).with_name(name)) for name in SOURCES]
            call = [command, *flags, "-o", str(made), *sources]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SubquadError(f"{' '.join(call)} failed:\n{done.stderr.strip()[-2000:]}")
            os.replace(made, path)
    except OSError as error:
        raise SubquadError(f"{folder}: {error}; SUBQUAD_CACHE names another folder") from None
    return Build(path, command, flags, True)


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why."""
    if os.environ.get("SUBQUAD_NATIVE", "1").lower() in ("0", "off", "no", "false"):
        return None, "SUBQUAD_NATIVE turns it off"
    if sys.platform == "win32":
        return None, "it is not made for Windows"
    if sys.byteorder != "little":
        return None, "it is made for little-endian processors"
    command = compiler()
    if command is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if not (cache_folder() / "native" / _name(command)).is_file():
                sys.stderr.write(
                    "subquad: compiling its C++ kernels for this processor, once (seconds); "
                    "SUBQUAD_NATIVE=0 does without\n"
                )
    try:
        found = build()
        loaded = ctypes.CDLL(str(found.path))
    except SubquadError as error:
        return None, str(error)
    except OSError as error:
        return None, f"the compiled library does not load: {error}"
    if loaded.subquad_version() != VERSION:
        return None, "the compiled library is another version's"
    return loaded, ""


def library() -> ctypes.CDLL | None:
    """The library, compiled and loaded at the first call; None where it cannot be had."""
    with _lock:
        return _loaded()[0]


def reason() -> str:
    """Why there is no library; empty if there is one."""
    with _lock:
        return _loaded()[1]


def reset() -> None:
    """Forgets what was found out, so that the next call looks again."""
    with _lock:
        _loaded.cache_clear()
