"""A GPT-2 of transformers, made parallel by one call, on random tokens.

    colossalai run --nproc_per_node 4 auto_parallel_with_gpt.py --tiny

Finds a cut for every operation: of the batch, of weights as in tensor parallelism, of both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import autoparallelize
from colossalai.booster import Booster
from colossalai.utils import get_current_device
from titans.utils.scripts import script_parser

SIZES = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50304}
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a model and a batch for CPU processes")
    parser.add_argument("--layers", type=int, help="blocks of the model")
    parser.add_argument("--batch_size", type=int, help="sequences, of all devices together (8)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (1024, with --tiny 64)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mesh", type=int, nargs="+", help="shape of the grid of devices, such as 2 2")
    parser.add_argument(
        "--memory_budget", type=float, default=-1.0, help="bytes that a device may use; -1 for any"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = dict(TINY if args.tiny else SIZES)
    sizes["n_layer"] = args.layers or sizes["n_layer"]
    torch.manual_seed(0)
    config = GPT2Config(**sizes, n_positions=args.length, bos_token_id=0, eos_token_id=0)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    return GPT2LMHeadModel(config).to(get_current_device(), dtype).train()


def batch_of(step: int, args: argparse.Namespace, vocabulary: int) -> dict[str, Tensor]:
    """The same batch on every device; the model learns to count, ever better."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocabulary, (args.batch_size, 1), generator=generator)
    ids = ((start + torch.arange(args.length)) % vocabulary).to(get_current_device())
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    args = parse_arguments()
    args.batch_size = args.batch_size or 8
    args.length = args.length or (64 if args.tiny else 1024)
    colossalai.launch_from_torch({}, verbose=False)
    first = dist.get_rank() == 0
    model = build_model(args)
    vocabulary = model.config.vocab_size
    started = time.perf_counter()
    model, solution = autoparallelize(
        model,
        meta_args=batch_of(0, args, vocabulary),
        logical_mesh_shape=args.mesh,
        memory_budget=args.memory_budget,
        return_solution=True,
    )
    if first:
        print(solution)
        print(f"parallel after {time.perf_counter() - started:.2f} s", flush=True)
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(args.steps):
        started = time.perf_counter()
        loss = model(**batch_of(step, args, vocabulary)).loss
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())  # waits for the device
        seconds = time.perf_counter() - started
        if first:
            tokens = args.batch_size * args.length / seconds
            print(
                f"step {step}: loss {value:.4f}, gradient norm {float(norm):.3f}, {seconds:.3f} s,"
                f" {tokens:,.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
