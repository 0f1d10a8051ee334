"""Tokens per second through HTTP, beside the generator itself and transformers, on one model in one run.

    python -m benchmarks.serving                       OPT-6.7B's shape with random weights, bf16, on a GPU
    python -m benchmarks.serving --tiny                half a minute on a CPU

Every figure is printed as soon as it is there, with the seconds since the start; what fails, or for which no
time is left, is left out.  The server is that of ``colossalai serve`` in processes of its own, except that
its rank draws the weights, so that nobody waits for a disk.  It starts while this process draws the same
weights, and is asked by the client of ``colossalai benchmark serve``.  Prompts are random tokens.

On the machine of a device visit, which has torch and transformers but no web server, the wheels of one come
along in an ignored folder.  They need no pip there:

    pip download -d build/wheels --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 fastapi uvicorn prometheus-client    # here
    python -m benchmarks.serving --wheels build/wheels --seconds 150 --then mixed profile    # there
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks import generation
from benchmarks.visit import turn
from colossalai.cli.benchmark.load import Load, Mix, percentile, run_load

TINY = {"layers": 2, "width": 64, "words": 300}
TOKENS = generation.PROMPT, generation.WRITTEN


def model_of(args: argparse.Namespace) -> Any:
    if args.tiny:
        return generation.opt(**TINY, device=args.device)
    return generation.whole() if args.device == "cuda" else generation.opt(device=args.device)


# ---- the server


def build(args: argparse.Namespace) -> Any:
    """The generator of the server's rank."""
    from colossalai.inference import Generator

    words = TINY["words"] if args.tiny else generation.WORDS
    most = max(args.requests)
    return Generator(
        model_of(args).requires_grad_(False), tokenizer(words), max_requests=most, max_length=sum(TOKENS)
    )


def tokenizer(words: int) -> Any:
    """One for which every token has a text: bytes first, then words that do not exist."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = [*bytes_to_unicode().values(), "<|endoftext|>"]
    names += [f"Ġw{number}" for number in range(len(names), words)]
    return GPT2Tokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[])


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM, on a port that is printed."""
    from benchmarks.serving import build  # by this name another process finds it
    from colossalai.serving import Generation, Job, Service, TextModel
    from colossalai.serving.http import Settings
    from colossalai.serving.http import serve as serve_http
    from colossalai.serving.http.server import bind

    settings = Settings(port=0)
    with closing(bind(settings)) as sock:
        service = Service(Job(Generation, {"build": build, "options": {"args": args}}))
        service.start()
        words = tokenizer(TINY["words"] if args.tiny else generation.WORDS)
        port = sock.getsockname()[1]
        try:
            serve_http(
                TextModel(service, words, max_length=sum(TOKENS)),
                settings,
                sock,
                announce=lambda: print(f"listening on http://127.0.0.1:{port}", flush=True),
            )
        finally:
            service.close()


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Callable[[], str]]:
    """Start it; what is yielded waits for it, and returns where it listens."""
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", "--serve", *sys.argv[1:]],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert process.stdout is not None
    lines = process.stdout

    def ready() -> str:
        # one that never comes up must not take the time of what is left to be measured
        late = threading.Timer(max(20.0, seconds_left(args) / 2), process.kill)
        late.start()
        line = next((line for line in lines if line.startswith("listening on ")), None)
        late.cancel()
        if line is None:
            raise RuntimeError(f"the server was not ready in time, or ended: exit code {process.wait()}")
        return line.split()[-1]

    try:
        yield ready
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


# ---- what is measured


def seconds_left(args: argparse.Namespace) -> float:
    return float(args.seconds) - (time.perf_counter() - generation.BEGIN)


def in_time(args: argparse.Namespace, what: str) -> bool:
    if seconds_left(args) > 0:
        return True
    generation.say(f"{what}: left out, {args.seconds:g} s are over")
    return False


def load(url: str, count: int, args: argparse.Namespace) -> dict[str, float]:
    """The best of two loads after one that is not counted."""
    best: dict[str, float] = {"tokens/s": 0.0}
    for repeat in range(3):
        asked = Load(
            requests=count,
            prompts=Mix.parse(str(TOKENS[0])),
            outputs=Mix.parse(str(TOKENS[1])),
            concurrency=count,
            seed=repeat,
        )
        samples = asyncio.run(run_load(url, asked, timeout=max(30.0, seconds_left(args))))
        if failed := [sample.error for sample in samples if sample.error]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        assert [sample.tokens for sample in samples] == [TOKENS[1]] * count
        speed = sum(sample.tokens for sample in samples) / max(sample.ended for sample in samples)
        if repeat == 0:
            continue
        first = [1000 * (sample.first or 0.0) for sample in samples]
        each = [1000 * (sample.per_token or 0.0) for sample in samples]
        found = {
            "tokens/s": speed,
            "first p50": percentile(first, 0.5),
            "first p99": percentile(first, 0.99),
            "token p50": percentile(each, 0.5),
            "token p99": percentile(each, 0.99),
        }
        words = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        generation.say(f"{count} requests, HTTP: {words} (times in ms)")
        best = max(best, found, key=lambda one: one["tokens/s"])
    return best


class Figures:
    """What was found, and what failed on the way."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.speeds: dict[str, dict[int, float]] = {}
        self.http: dict[int, dict[str, float]] = {}
        self.failed: list[str] = []

    def attempt(self, name: str, work: Callable[[], Any], *, in_turn: bool = True) -> Any:
        """The others say something without it."""
        if not in_time(self.args, name):
            return None
        try:
            with turn() if in_turn else nullcontext():
                return work()
        except Exception:
            self.failed.append(name)
            traceback.print_exc()
            return None
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    def add(self, name: str, rate: Callable[[Any, int], float], model: Any) -> None:
        """Tokens per second by the number of requests, of the model in this process."""
        for count in self.args.requests:
            found = self.attempt(f"{count} requests, {name}", lambda count=count: rate(model, count))
            if found is not None:
                self.speeds.setdefault(name, {})[count] = found
                generation.say(f"{count} requests, {name}: {found:.1f} tokens/s")

    def show(self) -> None:
        print(f"\n{TOKENS[0]} + {TOKENS[1]} tokens, {self.args.device}, times in ms")
        names = ["first p50", "first p99", "token p50", "token p99"]
        titles = ["requests", "HTTP tok/s", *(f"/ {name}" for name in self.speeds), *names]
        print("".join(f"{title:>16}" for title in titles))
        for count in self.args.requests:
            found, none = self.http.get(count, {}), float("nan")
            speed = found.get("tokens/s", none)
            values = [speed, *(speed / one.get(count, none) for one in self.speeds.values())]
            values += [found.get(name, none) for name in names]
            print(f"{count:16}" + "".join(f"{value:16.2f}" for value in values), flush=True)


def measure(args: argparse.Namespace) -> list[str]:
    """Print all figures; returns what failed."""
    figures = Figures(args)
    with server(args) as ready:
        model = model_of(args)
        url = figures.attempt("the server", ready, in_turn=False)
        generation.say(f"the server is at {url}")
        while args.after and Path(f"/proc/{args.after}").exists():
            time.sleep(0.2)
        figures.add("Generator", generation.rate_of_ours, model)
        for count in args.requests if url else []:
            found = figures.attempt(f"{count} requests, HTTP", lambda count=count: load(url, count, args))
            figures.http |= {count: found} if found else {}
        figures.show()
    for name in args.then:
        figures.attempt(name, generation.PARTS[name])
    # the slowest comes last: what the bars need is there even if the time is not
    figures.add("transformers", generation.rate_of_generate, model)
    figures.show()
    return figures.failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a small model, on whatever is there")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--seconds", type=float, default=240.0, help="after these nothing more is begun")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to import from")
    parser.add_argument(
        "--then", nargs="*", default=[], choices=generation.PARTS, help="parts of benchmarks.generation"
    )
    parser.add_argument("--after", type=int, help="a process whose end is waited for before measuring")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.serve:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(args.wheels.glob("*.whl")) if args.wheels else []:
            zipfile.ZipFile(wheel).extractall(folder)
        sys.path.insert(0, folder)  # of the server, too
        failed = measure(args)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
