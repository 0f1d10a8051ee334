"""Compile a C file of this folder, once for each machine and source (with the headers beside it), and load
it.

The library is kept in ``$COLOSSALAI_CACHE``, or ``~/.cache/colossalai``.  It is built under another name and
put in place by a rename, so that ranks that start together may all build it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",  # sqrt is an instruction then, and loops with it become vector code
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)


def cache_folder() -> Path:
    return Path(os.environ.get("COLOSSALAI_CACHE") or Path.home() / ".cache" / "colossalai")


def compiler() -> str:
    """The C compiler: ``$CC``, or the first of the usual names."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError("there is no C compiler: install gcc or clang, or set CC")


def load(name: str) -> ctypes.CDLL:
    """The library of ``<name>.c``."""
    return ctypes.CDLL(str(library(Path(__file__).with_name(f"{name}.c"))))


def library(source: Path) -> Path:
    """The file of the library of ``source``, compiled if it is not there yet."""
    texts = [source.read_bytes(), *(path.read_bytes() for path in sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(b"".join(texts) + repr((FLAGS, _machine())).encode()).hexdigest()[:16]
    target = cache_folder() / f"{source.stem}-{key}.so"
    if not target.exists():
        _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler(), *FLAGS, str(source), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        built.replace(target)


def _machine() -> str:
    """What code for the native processor depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
