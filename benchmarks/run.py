"""``make bench``: every benchmark, as ratios against named peers measured in the same run."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.table import show

    everything = ["start", "core", "optimizers", "training", "tensor_parallel", "pipeline", "disk"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(everything)} to run (default: all)")
    names = parser.parse_args().names or everything
    if unknown := sorted(set(names) - set(everything)):
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(everything)}")
    print(show([row for name in names for row in importlib.import_module(f"benchmarks.{name}").rows()]))
