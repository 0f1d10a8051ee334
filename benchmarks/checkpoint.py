"""Saving and loading a GPT with its Adam states: ``booster.save`` and ``load`` beside
``torch.distributed.checkpoint`` used directly.

    python -m benchmarks.checkpoint                       # GPT 1.56 B with Adam, fp32: 18.7 GB, on a GPU
    python -m benchmarks.checkpoint --small               # the same code with a toy, also on a CPU
    python -m benchmarks.checkpoint --depth 12 --width 768 --heads 12 --dir /mnt/disk

One process; both sides save and load the same tensors in turn, in the same directory, and a checkpoint is
removed before the next is written.  Before each load everything is set to zero, and afterwards it is compared
with what it was.  Both sides are equally durable: DCP's ``FileSystemWriter`` calls fsync on its files as ours
does.  "From the disk" is a load after the pages of the files were given up.  Memory is measured in a process
of its own for each side: without the pages of mapped files, which the system can take back.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TOY: dict[str, Any] = {"hidden_size": 64, "depth": 3, "num_heads": 2, "vocab_size": 512}
GIB = 2**30
BAR = 1.1
PARTS = ("times", "memory")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Subject:
    """A GPT with an AdamW that has all its states, without a step of training."""

    def __init__(self, args: argparse.Namespace) -> None:
        from titans.model.gpt import GPT

        sizes = {"hidden_size": args.width, "depth": args.depth, "num_heads": args.heads}
        with device():
            self.model: nn.Module = GPT(**(TOY if args.small else sizes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for p in self.model.parameters():
            self.optimizer.state[p] = {
                "step": torch.tensor(5.0),
                "exp_avg": torch.randn_like(p) * 1e-3,
                "exp_avg_sq": torch.rand_like(p) * 1e-6,
            }

    def tensors(self) -> list[Tensor]:
        """As the optimizer has them now: a load may put others in their place."""
        found = [p.detach() for p in self.model.parameters()]
        return found + [s[key] for s in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def clear(self) -> list[Tensor]:
        """Set everything to zero; returns what ``check`` needs."""
        sums = [t.double().sum() for t in self.tensors()]
        for t in self.tensors():
            t.zero_()
        return sums

    def check(self, sums: list[Tensor]) -> None:
        assert all(torch.equal(t.double().sum(), s) for t, s in zip(self.tensors(), sums, strict=True))


class Ours:
    def __init__(self, subject: Subject) -> None:
        from colossalai.booster import Booster

        self.booster = Booster()
        self.booster.boost(subject.model, subject.optimizer)

    def save(self, folder: Path) -> None:
        self.booster.save(folder)

    def load(self, folder: Path) -> None:
        self.booster.load(folder)


class Dcp:
    """The recipe of torch's documents; ``state`` of the last load, and how long its last step took."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.setting = 0.0

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.subject.model, self.subject.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)

        def put() -> None:
            set_state_dict(
                self.subject.model,
                self.subject.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )

        self.setting = seconds(put)


SIDES: dict[str, Callable[[Subject], Any]] = {"ours": Ours, "dcp": Dcp}


def seconds(work: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def give_up_pages(folder: Path) -> None:
    """Make the next read of the files in ``folder`` come from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


class Times(dict[str, list[float]]):
    def add(self, what: str, value: float) -> None:
        self.setdefault(what, []).append(value)
        print(f"  {what}: {value:.3f} s", file=sys.stderr, flush=True)

    def __getitem__(self, what: str) -> float:  # type: ignore[override]
        return median(super().__getitem__(what))


def compare(subject: Subject, sides: dict[str, Any], root: Path, tries: int) -> tuple[Times, dict[str, int]]:
    """Save and load with each side in turn."""
    times, sizes = Times(), {}
    for _ in range(tries):
        for name, side in sides.items():
            folder = root / name
            times.add(f"{name} save", seconds(lambda side=side, folder=folder: side.save(folder)))
            sizes[name] = size_of(folder)
            for kind in ("from the disk", "from memory"):
                if kind == "from the disk":
                    give_up_pages(folder)
                sums = subject.clear()
                times.add(f"{name} load {kind}", seconds(lambda side=side, folder=folder: side.load(folder)))
                subject.check(sums)
                if name == "dcp":
                    times.add(f"dcp set {kind}", side.setting)
            if name == "ours":
                load = side.booster.load
                times.add("unverified", seconds(lambda load=load, folder=folder: load(folder, verify=False)))
            shutil.rmtree(folder)
    return times, sizes


def background(subject: Subject, ours: Ours, root: Path, tries: int) -> Times:
    """The pause and the whole of saves in the background, and one copy to host memory that is there
    already.
    """
    times = Times()
    for number in range(tries + 1):
        folder = root / "background"
        start = time.perf_counter()
        save = ours.booster.save(folder, background=True)
        pause = time.perf_counter() - start
        save.wait()
        total = time.perf_counter() - start
        first = "first " if number == 0 else ""  # gets the host memory, too
        times.add(f"{first}pause", pause)
        times.add(f"{first}total", total)
        shutil.rmtree(folder)
    del ours.booster._runs.writer._buffer
    ours.booster._runs.writer._buffer = None
    times.add("copy", one_copy(subject))
    return times


def one_copy(subject: Subject) -> float:
    from colossalai.utils.memory.host_memory import host_empty

    tensors = subject.tensors()
    room = host_empty(sum(t.numel() for t in tensors), torch.float32)

    def copy() -> None:
        place = 0
        for t in tensors:
            room[place : place + t.numel()].view(t.shape).copy_(t, non_blocking=True)
            place += t.numel()

    return median(seconds(copy) for _ in range(3))


class Memory:
    """The peaks of this process above what it had when this began."""

    def __enter__(self) -> Memory:
        self._start, self._peak_before = self._private(), _maxrss()
        self._most = self._start
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._gpu = torch.cuda.memory_allocated()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.host = (self._most - self._start) / GIB
        self.with_pages = (_maxrss() - self._peak_before) / GIB
        cuda = torch.cuda.is_available()
        self.gpu = (torch.cuda.max_memory_allocated() - self._gpu) / GIB if cuda else 0.0

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self._most = max(self._most, self._private())

    @staticmethod
    def _private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {key: value for key, _, value in (line.partition(":") for line in lines)}
        return sum(int(sizes[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def _maxrss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure_memory(what: str, subject: Subject, root: Path) -> dict[str, float]:
    """In a process of its own: ``what`` is a side and ``save`` or ``load``."""
    name, act = what.split("-")
    side = SIDES[name](subject)
    import torch.distributed.checkpoint.state_dict  # noqa: F401  (not a part of the peak)

    with Memory() as memory:
        getattr(side, act)(root / name)
    return {"GPU": memory.gpu, "host": memory.host, "host and mapped files": memory.with_pages}


def memory_of(what: str, root: Path) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoint",
        *sys.argv[1:],
        "--one",
        what,
        "--folder",
        str(root),
    ]
    found = subprocess.run(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parent.parent, check=True
    )
    result: dict[str, float] = json.loads(found.stdout.decode().strip().splitlines()[-1])
    return result


def all_memory(root: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in SIDES:
        for act in ("save", "load"):
            found[f"{name}-{act}"] = memory_of(f"{name}-{act}", root)
            print(f"  {name} {act}: {found[f'{name}-{act}']} GiB", file=sys.stderr, flush=True)
        shutil.rmtree(root / name)
    return found


def line(what: str, ours: float, peer: float, unit: str, peer_name: str, bar: float | None = None) -> str:
    ratio = f"{ours / peer:8.2f}" if peer > 1e-3 else f"{'-':>8}"
    judged = "" if bar is None else f"  ({'within' if ours <= bar * peer else 'ABOVE'} {bar})"
    return f"{what:34}{ours:9.3f} {unit:4}{peer:9.3f} {unit:4}{ratio}   {peer_name}{judged}"


def report_times(times: Times, sizes: dict[str, int]) -> None:
    print(f"{'':34}{'ours':>9} {'':4}{'peer':>9} {'':4}{'ratio':>8}   peer")
    print(line("save", times["ours save"], times["dcp save"], "s", "dcp.save", BAR))
    for kind in ("from the disk", "from memory"):
        ours, dcp, put = (times[f"{key} {kind}"] for key in ("ours load", "dcp load", "dcp set"))
        print(line(f"load {kind}", ours, dcp, "s", "dcp.load and set_state_dict", BAR))
        print(line("", ours, dcp - put, "s", "dcp.load alone"))
    verified, without = times["ours load from memory"], times["unverified"]
    print(line("load from memory, verify=False", without, verified, "s", "with verify, our default"))
    print(line("size on disk", sizes["ours"] / GIB, sizes["dcp"] / GIB, "GiB", "DCP", 1.01), flush=True)


def report_background(hidden: Times, save: float) -> None:
    usual = "our save in the foreground"
    print(line("background: pause", hidden["pause"], save, "s", usual))
    print(line("", hidden["pause"], hidden["copy"], "s", "one copy to host memory"))
    print(line("background: first pause", hidden["first pause"], save, "s", usual))
    print(line("background: total", hidden["total"], save, "s", usual), flush=True)


def report_memory(memory: dict[str, dict[str, float]]) -> None:
    for act in ("save", "load"):
        for where in ("GPU", "host", "host and mapped files"):
            ours, dcp = (memory[f"{side}-{act}"][where] for side in SIDES)
            print(line(f"{act}: extra {where}", ours, dcp, "GiB", "DCP"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a toy, to try the code on a CPU")
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dir", default=None, help="where to write; by default TMPDIR")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def start_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def main() -> None:
    args = arguments()
    start_group()
    subject = Subject(args)
    if args.one:
        print(json.dumps(measure_memory(args.one, subject, Path(args.folder))), flush=True)
        return
    parameters = sum(p.numel() for p in subject.model.parameters())
    print(
        f"GPT of {parameters / 1e9:.2f} B parameters with AdamW on {device().type},"
        f" {subject.nbytes / 1e9:.2f} GB, torch {torch.__version__}, {os.cpu_count()} cores; medians of"
        f" {args.tries}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.dir) as found:
        root = Path(found)
        sides = {name: make(subject) for name, make in SIDES.items()}
        if "times" in args.parts:
            times, sizes = compare(subject, sides, root, args.tries)
            report_times(times, sizes)
            report_background(background(subject, sides["ours"], root, args.tries), times["ours save"])
        if "memory" in args.parts:
            del subject, sides  # the processes that are measured have their own
            report_memory(all_memory(root))


if __name__ == "__main__":
    main()
