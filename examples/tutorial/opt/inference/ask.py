"""Train a small OPT on a text, save it, serve it, and ask it: from nothing to an answer in a minute.

    python ask.py
    python ask.py --model FOLDER --prompt "Hello"          serve what you have trained

The training is `../opt/run_clm.py` on a model of bytes; what it saves is a folder of Hugging Face, which
`colossalai serve` opens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXT = "The quick brown fox jumps over the lazy dog, and the dog goes on sleeping in the sun. "


def train(folder: Path, ranks: int, epochs: int) -> None:
    """Write a trained model to ``folder``."""
    text = folder.with_suffix(".txt")
    text.write_text(TEXT * 80)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["run_clm.py", "--config_name", "tiny", "--train_file", str(text), "--output_dir", str(folder)]
    command += ["--block_size", "64", "--per_device_train_batch_size", "8", "--learning_rate", "0.01"]
    command += ["--num_train_epochs", str(epochs)]
    subprocess.run(command, cwd=HERE.parent / "opt", check=True)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of the model in ``folder``."""
    command = [sys.executable, "-m", "colossalai", "serve", str(folder), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"the server ended with exit code {server.wait()}")
        yield line.split()[-1]
    finally:
        server.terminate()
        server.wait()


def ask(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of the answer, as they come."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--model", type=Path, help="a folder of Hugging Face; default: one that is trained now"
    )
    parser.add_argument("--prompt", default="The quick brown fox")
    parser.add_argument("--max_tokens", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train, and that serve")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "fox"
        if args.model is None:
            train(folder, args.ranks, args.epochs)
        with served(folder, "--tp", str(args.ranks)) as url:
            print(f"==> {url}")
            print(args.prompt, end="", flush=True)
            body = {"prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0}
            for piece in ask(url, body):
                print(piece, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
