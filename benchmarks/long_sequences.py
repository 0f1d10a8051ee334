"""The longest sequence that a BERT trains on within a budget of memory, on 1, 2, 4 ... ranks that cut it.

    python -m benchmarks.long_sequences --budget-gib 16

Nothing is timed and no GPU is needed: a dry run plays a training step on the meta device and counts bytes.
The weights and states are those of a whole model on each rank, the table of positions grows with the
sequence; activations are cut.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from colossalai.dry_run import MemoryEstimate, Parts, dry_run
from colossalai.nn import CrossEntropyLoss
from titans.model.bert import BERT

STEP = 512  # lengths that are tried are multiples of it


def build(length: int, depth: int, checkpoint: bool, **sizes: int) -> Parts:
    model = BERT(
        max_position_embeddings=length,
        depth=depth,
        attention_dropout=0.0,
        dtype=torch.bfloat16,
        checkpoint=checkpoint,
        **sizes,
    )
    ids = torch.zeros(1, length, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    return Parts(model, optimizer, CrossEntropyLoss(), ({"input_ids": ids}, ids))


def memory(length: int, ranks: int, attention: str, **model: Any) -> MemoryEstimate:
    """What the first rank needs; the others need the same."""
    plan = {"sequence": {"size": ranks, "attention": attention}} if ranks > 1 else {}
    return dry_run({"parallel": plan}, ranks, partial(build, length, **model))[0].memory


def longest(budget: int, ranks: int, attention: str, **model: Any) -> int:
    """The longest sequence, in steps of ``STEP``, whose step fits into ``budget`` bytes."""
    few, many = 2 * STEP * ranks, 4 * STEP * ranks
    low, high = (memory(n, ranks, attention, **model).peak for n in (few, many))
    # bytes grow in proportion: the guess is near, and then tried
    length = few + int((budget - low) / (high - low) * (many - few)) // STEP * STEP
    while memory(length, ranks, attention, **model).peak > budget:
        length -= STEP
    while memory(length + STEP, ranks, attention, **model).peak <= budget:
        length += STEP
    return length


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-gib", type=float, default=16.0)
    parser.add_argument("--attention", default="ring", choices=["ring", "ulysses", "both"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    args = parser.parse_args()
    print("| ranks | longest sequence | times that of one rank | activations / GiB |\n|---|---|---|---|")
    first = None
    for ranks in args.ranks:
        model = {"depth": args.depth, "checkpoint": args.checkpoint}
        found = longest(int(args.budget_gib * 2**30), ranks, args.attention, **model)
        first = first or found / ranks
        held = memory(found, ranks, args.attention, **model).activations / 2**30
        print(f"| {ranks} | {found:,} | {found / first:.2f} | {held:.2f} |", flush=True)


if __name__ == "__main__":
    main()
