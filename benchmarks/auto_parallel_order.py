"""Do plans rank as they were predicted: ``python benchmarks/auto_parallel_order.py``.

Four gloo ranks train a GPT-2 under plans of very different costs: the best, the best data-parallel one, the
best one that does not cut the batch, and one that computes everything everywhere.  Links are measured first.
Pairs whose predictions differ by more than a fifth should take times in the same order.  Plans take turns,
and of each the fastest step counts, so that other jobs of the machine disturb all alike.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import (
    build_strategy_constructor,
    initialize_device_mesh,
    solve_solution,
)
from colossalai.auto_parallel.tensor_shard.options import SolverPerference
from colossalai.auto_parallel.tensor_shard.runtime import transform
from colossalai.auto_parallel.tensor_shard.sharded_plan import ShardedPlan
from colossalai.auto_parallel.tensor_shard.strategies.chosen import sharded_plan
from colossalai.fx import OpGraph, trace_model
from colossalai.testing import spawn

MARGIN = 0.2


def build(hidden: int, length: int, batch: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=hidden,
        n_head=4,
        n_positions=length,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(1024, (batch, length), generator=torch.Generator().manual_seed(0))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def plans(graph: OpGraph, device_mesh: Any) -> dict[str, ShardedPlan]:
    """Plans of one traced model, by name."""
    found: dict[str, ShardedPlan] = {}
    for preference in SolverPerference:
        constructor = build_strategy_constructor(graph, device_mesh, preference.value)
        found[preference.value] = solve_solution(constructor).sharded
    problem = build_strategy_constructor(graph, device_mesh).problem
    found["everywhere"] = sharded_plan(problem, [0] * len(problem.vertices))
    return found


def run(
    rank: int, world_size: int, port: int, sizes: tuple[int, int, int], steps: int
) -> list[tuple[str, float, float]]:
    """For each plan its predicted and its measured milliseconds."""
    torch.set_num_threads(1)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    device_mesh = initialize_device_mesh(logical_mesh_shape=(2, 2))
    planned: dict[str, torch.nn.Module] = {}
    predicted: dict[str, float] = {}
    model, batch = build(*sizes)
    for name in plans(trace_model(model, **batch), device_mesh):
        model, batch = build(*sizes)
        graph = trace_model(model, **batch)
        plan = plans(graph, device_mesh)[name]
        planned[name] = transform(model, graph, plan, device_mesh)
        predicted[name] = plan.predicted.compute + plan.predicted.communication
        planned[name](**batch).loss.backward()
    times: dict[str, list[float]] = {name: [] for name in planned}
    for name in [*planned] * steps:
        torch.distributed.barrier()
        start = time.perf_counter()
        planned[name](**batch).loss.backward()
        torch.distributed.barrier()
        times[name].append(time.perf_counter() - start)
    return [(name, 1000 * predicted[name], 1000 * min(times[name])) for name in planned]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    rows = spawn(run, 4, timeout=600, sizes=(args.hidden, args.length, args.batch), steps=args.steps)[0]
    print(f"{'plan':12}{'predicted ms':>14}{'measured ms':>14}")
    for name, predicted, measured in rows:
        print(f"{name:12}{predicted:14.2f}{measured:14.2f}")
    pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if b[1] > a[1] * (1 + MARGIN)]
    wrong = [f"{a[0]} before {b[0]}" for a, b in pairs if a[2] >= b[2]]
    print(
        f"{len(pairs)} pairs differ by more than {MARGIN:.0%};"
        f" in the wrong order: {', '.join(wrong) or 'none'}"
    )


if __name__ == "__main__":
    main()
