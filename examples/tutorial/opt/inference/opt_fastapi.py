"""Serve OPT over HTTP: ``POST /generation``, with batches and a cache.

    python opt_fastapi.py opt-125m --tp 2 --checkpoint /data/opt-125m

The checkpoint is a folder of Hugging Face (safetensors) or metaseq's ``restored.pt``; without one, weights
are random.  http://localhost:7070/docs shows the routes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from colossalai.serving import ListCache, StartError
from colossalai.serving.loading import open_tokenizer
from energonai import BatchManagerForGeneration, launch_engine
from energonai.model import opt_6B, opt_30B, opt_125M, opt_175B

MODELS = {"opt-125m": opt_125M, "opt-6.7b": opt_6B, "opt-30b": opt_30B, "opt-175b": opt_175B}
TOKENIZER = "facebook/opt-30b"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--master_host", default="localhost")
    parser.add_argument("--master_port", type=int, default=19990, help="where the ranks meet; 0: any port")
    parser.add_argument("--rpc_port", type=int, default=19980, help="of no effect on one machine")
    parser.add_argument("--max_batch_size", type=int, default=8)
    parser.add_argument("--pipe_size", type=int, default=1, help="batches under way")
    parser.add_argument("--queue_size", type=int, default=0, help="requests that may wait; 0: any number")
    parser.add_argument("--http_host", default="0.0.0.0")
    parser.add_argument("--http_port", type=int, default=7070)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--cache_size", type=int, default=0, help="queries whose results are kept")
    parser.add_argument("--cache_list_size", type=int, default=1, help="results of each")
    parser.add_argument(
        "--tokenizer", default=None, help=f"a folder; default: the checkpoint's, or {TOKENIZER}"
    )
    return parser.parse_args()


def print_args(args: argparse.Namespace) -> None:
    print("\n==> Args:")
    for name, value in vars(args).items():
        print(f"{name} = {value}")


def tokenizer_of(args: argparse.Namespace) -> Any:
    checkpoint = Path(args.checkpoint) if args.checkpoint is not None else None
    if checkpoint is not None and not checkpoint.exists():
        raise ValueError(f"there is no checkpoint {checkpoint}")
    beside = checkpoint is not None and checkpoint.is_dir() and any(checkpoint.glob("tokenizer*"))
    return open_tokenizer(args.tokenizer or (checkpoint if beside else TOKENIZER), known=True)


def serve(args: argparse.Namespace) -> None:
    from colossalai.serving.http import Settings
    from colossalai.serving.http.engine_app import EngineText, serve_engine
    from colossalai.serving.http.server import bind

    tokenizer = tokenizer_of(args)
    settings = Settings(host=args.http_host, port=args.http_port)
    cache = ListCache(args.cache_size, args.cache_list_size) if args.cache_size else None
    sock = bind(settings)
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    engine = launch_engine(
        args.tp,
        1,
        args.master_host,
        args.master_port,
        args.rpc_port,
        MODELS[args.model],
        batch_manager=BatchManagerForGeneration(args.max_batch_size, pad),
        pipe_size=args.pipe_size,
        queue_size=args.queue_size,
        checkpoint=args.checkpoint,
    )
    assert engine is not None
    port = sock.getsockname()[1]
    serve_engine(
        EngineText(engine, tokenizer, cache),
        settings,
        sock,
        announce=lambda: print(f"listening on http://localhost:{port}", flush=True),
    )


def main(name: str = "opt_fastapi.py") -> None:
    args = parse_args()
    print_args(args)
    try:
        serve(args)
    except (ValueError, OSError, StartError, ModuleNotFoundError) as error:
        sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
