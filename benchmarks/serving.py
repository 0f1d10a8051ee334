"""Tokens per second through HTTP, beside the generator itself and transformers, on one model in one run.

    python -m benchmarks.serving                       OPT-6.7B's shape with random weights, bf16, on a GPU
    python -m benchmarks.serving --tiny                a minute on a CPU

Every figure is printed as soon as it is there, with the seconds since the start.  On the machine of a device
visit, which has torch and transformers but no web server, the wheels of one come along in an ignored folder:

    pip download -d build/wheels --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 fastapi uvicorn prometheus-client    # here
    pip install --no-index --find-links build/wheels fastapi uvicorn prometheus-client    # there
    python -m benchmarks.serving --seconds 240

Each prompt has as many random tokens as is stated, and each answer exactly as many more.  The server is
``colossalai serve`` in processes of its own, asked by ``colossalai benchmark serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colossalai.cli.benchmark.load import Load, Mix, percentile, run_load

SHAPES = {
    "6.7b": (32, 4096, 32, 50272, 2048),
    "tiny": (2, 64, 4, 300, 512),
}


def write_model(folder: Path, shape: str, device: str, dtype: torch.dtype) -> None:
    """Random weights of OPT's shape, drawn on the device, and a tokenizer of bytes."""
    from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    layers, width, heads, words, positions = SHAPES[shape]
    config = OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        vocab_size=words,
        max_position_embeddings=positions,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = OPTForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    alphabet = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    GPT2Tokenizer(vocab={**alphabet, "<|endoftext|>": len(alphabet)}, merges=[]).save_pretrained(folder)


def prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(3, 250) for _ in range(length)] for _ in range(count)]


def timed(work: Callable[[], int], device: str, repeats: int = 2) -> float:
    """Tokens in a second, the best of the repeats after one that is not counted."""
    best = 0.0
    for repeat in range(repeats + 1):
        began = time.monotonic()
        tokens = work()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            best = max(best, tokens / (time.monotonic() - began))
    return best


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """A figure at once: a run that is cut short leaves those that it had."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


def in_time(args: argparse.Namespace, what: str) -> bool:
    if time.monotonic() - _BEGAN < args.seconds:
        return True
    say(f"{what}: left out, {args.seconds:g} s are over")
    return False


def offline(folder: Path, args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of ``Generator.generate``, in this process."""
    from colossalai.inference import Generator, Sampling
    from colossalai.serving.loading import load_model

    model = load_model(folder).to(args.device)
    found = {}
    for count in args.requests:
        generator = Generator(
            model, max_requests=count, max_length=args.length + args.tokens, prefix_reuse=False
        )
        sampling = Sampling(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)

        asked = prompts(count, args.length)

        def work(generator: Any = generator, sampling: Any = sampling, asked: Any = asked) -> int:
            return sum(len(one.tokens) for one in generator.generate(asked, sampling))

        found[count] = timed(work, args.device)
        say(f"generator, {count} requests: {found[count]:.1f} tokens/s")
        generator.close()
        del generator
    return found


def transformers(folder: Path, args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of transformers' ``generate`` with a batch of all requests."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).to(args.device).eval()
    found = {}
    for count in args.requests:
        if not in_time(args, f"transformers, {count} requests"):
            break
        ids = torch.tensor(prompts(count, args.length), device=args.device)

        def work(ids: Any = ids) -> int:
            with torch.no_grad():
                done = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.tokens,
                    min_new_tokens=args.tokens,
                    do_sample=False,
                )
            return (done.shape[1] - ids.shape[1]) * len(ids)

        found[count] = timed(work, args.device, repeats=1)
        say(f"transformers, {count} requests: {found[count]:.1f} tokens/s")
    return found


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def through_http(folder: Path, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Tokens per second and times, at each number of requests, of a server in processes of its own."""
    most = max(args.requests)
    command = [sys.executable, "-m", "colossalai", "serve", str(folder), "--port", "0"]
    command += ["--max-requests", str(most), "--max-length", str(args.length + args.tokens)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        line = next((line for line in server.stdout if line.startswith("listening on ")), None)
        if line is None:
            raise RuntimeError(f"the server ended with exit code {server.wait()}")
        say("the server is ready")
        return {
            count: _load(line.split()[-1], count, args)
            for count in args.requests
            if in_time(args, f"http, {count} requests")
        }
    finally:
        server.terminate()
        server.wait(60)


def _load(url: str, count: int, args: argparse.Namespace) -> dict[str, float]:
    best: dict[str, float] = {"tokens/s": 0.0}
    for repeat in range(3):  # the first is not counted
        load = Load(
            requests=count,
            prompts=Mix.parse(str(args.length)),
            outputs=Mix.parse(str(args.tokens)),
            concurrency=count,
            seed=repeat,
        )
        samples = asyncio.run(run_load(url, load))
        if failed := [sample.error for sample in samples if sample.error]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        speed = sum(sample.tokens for sample in samples) / max(sample.ended for sample in samples)
        if repeat and speed > best["tokens/s"]:
            first = [sample.first or 0.0 for sample in samples]
            each = [sample.per_token or 0.0 for sample in samples]
            best = {
                "tokens/s": speed,
                "first p50": 1000 * percentile(first, 0.5),
                "first p99": 1000 * percentile(first, 0.99),
                "token p50": 1000 * percentile(each, 0.5),
                "token p99": 1000 * percentile(each, 0.99),
            }
        if repeat:
            say(f"http, {count} requests: {speed:.1f} tokens/s; {_in_words(best)}")
    return best


def _in_words(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in times.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a small model, on whatever is there")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument(
        "--folder", type=Path, help="where the model is written; default: memory, if there is room"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="after these nothing more is begun")
    parser.add_argument("--without", nargs="*", default=[], choices=["transformers", "offline", "http"])
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 20 << 30
    folder = Path(tempfile.mkdtemp(dir=args.folder or (shm if roomy else None)))
    try:
        write_model(folder, "tiny" if args.tiny else "6.7b", args.device, dtype)
        say(f"the model is in {folder}")
        free()
        speeds: dict[str, dict[int, float]] = {}
        http: dict[int, dict[str, float]] = {}
        # transformers comes last: what the bar needs is there even if the time is not
        for name in ("offline", "http", "transformers"):
            if name in args.without:
                continue
            if name == "http":
                http = through_http(folder, args)
            else:
                speeds[name] = {"offline": offline, "transformers": transformers}[name](folder, args)
            free()
            _show(args, speeds, http)
    finally:
        shutil.rmtree(folder)


def _show(
    args: argparse.Namespace, speeds: dict[str, dict[int, float]], http: dict[int, dict[str, float]]
) -> None:
    print(f"\n{args.length} + {args.tokens} tokens, {args.device}, times in ms")
    names = ["first p50", "first p99", "token p50", "token p99"]
    titles = ["requests", "http tok/s", *(f"/ {name}" for name in speeds), *names]
    print("".join(f"{title:>16}" for title in titles))
    for count in args.requests:
        found = http.get(count, {})
        speed = found.get("tokens/s", float("nan"))
        values = [count, speed, *(speed / one.get(count, float("nan")) for one in speeds.values())]
        values += [found.get(name, float("nan")) for name in names]
        print("".join(f"{value:16.2f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
