"""The options of the demo, checked before any process waits for another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OUT = "runs/demo"
SHAPE = {"seq_len": 64, "hidden": 128, "layers": 2, "heads": 4}  # a checkpoint brings its own
# A checkpoint brings these too, so that --resume goes on with the same training; here another value may be
# given.
TRAINING = {
    "steps": 1800,
    "batch_size": 8,
    "lr": 3e-3,
    "seed": 1024,
    "text_bytes": 6_000_000,
    "time_limit": 75.0,
}


def parse_arguments() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and what ``--resume`` and ``--sample-only`` find in the checkpoint."""
    parser = build_parser()
    args = parser.parse_args()
    saved = _read_checkpoint(parser, args) if args.resume or args.sample_only is not None else {}
    for name, default in SHAPE.items():
        given, stored = getattr(args, name), saved.get("shape", {}).get(name)
        if stored and given and given != stored:
            option = "--" + name.replace("_", "-")
            parser.error(
                f"the checkpoint in {args.out} has {option} {stored}, not {given}; leave {option} out"
            )
        setattr(args, name, stored or given or default)
    for name, value in {**TRAINING, **saved.get("training", {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.resume and args.sample_only is None and saved["step"] >= args.steps:
        parser.error(f"the checkpoint is at step {saved['step']} already; pass a higher --steps to go on")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not divisible by --heads {args.heads}")
    if args.seq_len < 2:
        parser.error("--seq-len must be at least 2: each token is predicted from those before it")
    if not args.lr > 0 or not args.time_limit >= 0:
        parser.error(f"--lr must be above 0 and --time-limit not below, got {args.lr} and {args.time_limit}")
    return args, saved


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source of Python's standard library, then let it write some"
        " Python."
    )
    add = parser.add_argument
    add("--steps", type=positive, help=f"optimizer steps (default: {TRAINING['steps']})")
    add("--batch-size", type=positive, help=f"windows per process and step ({TRAINING['batch_size']})")
    add("--seq-len", type=positive, help=f"tokens per window ({SHAPE['seq_len']})")
    add("--hidden", type=positive, help=f"width of the model ({SHAPE['hidden']})")
    add("--layers", type=positive, help=f"transformer blocks ({SHAPE['layers']})")
    add("--heads", type=positive, help=f"attention heads per block ({SHAPE['heads']})")
    add("--lr", type=float, help=f"highest learning rate ({TRAINING['lr']})")
    add("--seed", type=int, help=f"of weights, data order and samples ({TRAINING['seed']})")
    add("--out", default=OUT, help="folder for the results (%(default)s)")
    add("--text-bytes", type=positive, help=f"text to read ({TRAINING['text_bytes']})")
    add(
        "--time-limit",
        type=float,
        metavar="S",
        help="on a slow machine, take fewer steps so that the training ends after S seconds; 0: never"
        f" ({TRAINING['time_limit']})",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out, with its options unless you give others",
    )
    add("--sample-only", metavar="PROMPT", help="do not train: continue PROMPT with the checkpoint")
    return parser


def _read_checkpoint(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.out) / "checkpoint" / "demo.json"
    if not path.is_file():
        parser.error(f"there is no checkpoint in {args.out}; train without --resume first, or correct --out")
    saved: dict[str, Any] = json.loads(path.read_text())
    if args.sample_only == "":
        parser.error("--sample-only needs a prompt of at least one letter to go on from")
    return saved


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
