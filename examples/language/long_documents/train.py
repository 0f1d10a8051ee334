"""Fine-tune a LLaMA of transformers on documents that are longer than one process could hold.

    colossalai run --nproc_per_node 4 train.py

Every process holds the whole model and a part of each sequence; attention reaches across the processes. The
documents are the largest modules of Python's standard library, as bytes, packed one after the other into rows
of ``--length`` tokens. Positions start again with each document, so that none looks at the one before.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin

WORDS = 257  # a byte is a token, and 0 ends a document
IGNORED = -100


def documents(count: int) -> list[Tensor]:
    """The tokens of the largest modules of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: (-p.stat().st_size, p.name))
    texts = (torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files[:count])
    return [torch.cat([text.long() + 1, torch.zeros(1, dtype=torch.long)]) for text in texts]


class PackedRows(Dataset[dict[str, Tensor]]):
    """Documents one after the other in rows of ``length`` tokens; one that does not fit goes on in the next
    row.
    """

    def __init__(self, texts: list[Tensor], length: int) -> None:
        self.length = length
        self.ids = torch.cat(texts)
        self.starts = torch.cat([torch.arange(len(text)) == 0 for text in texts])

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        here = slice(row * self.length, (row + 1) * self.length)
        ids, starts = self.ids[here], self.starts[here].clone()
        starts[0] = True
        places = torch.arange(self.length)
        positions = places - torch.where(starts, places, 0).cummax(0).values
        # what begins a document does not follow from the token before
        return {"input_ids": ids, "position_ids": positions, "labels": torch.where(starts, IGNORED, ids)}


def build(path: str | None, length: int) -> PreTrainedModel:
    """A LLaMA from a folder or the Hub, or a tiny one."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=1, help="rows in a batch of each replica")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--documents", type=int, default=16, help="how many modules are read")
    parser.add_argument("--sequence", type=int, help="ranks of one sequence; by default all")
    parser.add_argument("--attention", choices=("ring", "ulysses", "both"), default="ring")
    parser.add_argument(
        "--model", help="a folder or a name of the Hub, whose tokens must be bytes; else tiny"
    )
    parser.add_argument("--out", help="the folder to write the model to")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    size = args.sequence or int(os.environ.get("WORLD_SIZE", 1))
    sequence = {"size": size, "attention": args.attention}
    colossalai.launch_from_torch(config={"parallel": {"sequence": sequence}}, seed=0, verbose=False)

    model = build(args.model, args.length)
    # labels become a loss without whole hidden states or scores on any rank
    model = colossalai.nn.parallelize(model, whole_scores=False)
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    booster = Booster(plugin=plugin)
    rows = PackedRows(documents(args.documents), args.length)
    loader = plugin.prepare_dataloader(rows, batch_size=args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, *_ = booster.boost(model, optimizer)
    if dist.get_rank() == 0:
        print(f"{len(rows)} rows of {args.length} tokens; a rank holds {-(-args.length // size)} of each")

    for step, batch in zip(range(args.steps), forever(loader), strict=False):
        # transformers tells documents apart by their positions, but not where it keeps a cache
        loss = model(**batch, use_cache=False).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            parts = int((batch["position_ids"] == 0).sum())
            print(
                f"step {step + 1} / {args.steps} | documents: {parts} | loss: {loss.item():.4f}", flush=True
            )
    if args.out is not None:
        model.unwrap().save_pretrained(args.out)


def forever(loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
