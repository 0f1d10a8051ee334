"""How long ``autoparallelize`` takes: ``python benchmarks/auto_parallel_plan.py``.

From the call to the transformed model, in one process of a job that does not exist, beside the time that
``make_fx`` alone needs to record a step of the same model: its forward and backward pass, down to the
kernels.  Models are on the meta device, so nothing is computed: of the transformation, weights are not cut.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import Row, show
from colossalai.auto_parallel.tensor_shard.initialize import build_strategy_constructor, solve_solution
from colossalai.auto_parallel.tensor_shard.runtime.sharded_model import PlannedRun
from colossalai.auto_parallel.tensor_shard.solution import Solution
from colossalai.context.fake_launch import fake_world
from colossalai.device import DeviceMesh
from colossalai.fx import trace_model


@dataclass(frozen=True)
class Case:
    """A GPT and the grid that it is planned for."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    grid: tuple[int, int]


CASES = {
    "gpt2": Case("GPT-2, 12 layers", 12, 768, 12, 1024, 8, (2, 4)),
    "gpt3": Case("GPT-3, 96 layers", 96, 12288, 96, 2048, 8, (2, 4)),
}


def build(case: Case) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its batch, without memory."""
    config = transformers.GPT2Config(
        n_layer=case.layers, n_embd=case.hidden, n_head=case.heads, n_positions=case.sequence
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.zeros(case.batch, case.sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def bare_trace(case: Case) -> int:
    """Record forward and backward pass with ``make_fx``; the number of its nodes."""
    model, batch = build(case)
    model.config.use_cache = False
    names = [name for name, _ in model.named_parameters()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = {n: torch.empty(p.shape, requires_grad=True) for n, p in model.named_parameters()}
        inputs = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in batch.items()}
        buffers = {name: torch.zeros(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}

        def step(values: list[Tensor], given: dict[str, Tensor]) -> Any:
            state = {**dict(zip(names, values, strict=True)), **buffers}
            loss = torch.func.functional_call(model, state, kwargs=given).loss
            return torch.autograd.grad(loss, values, allow_unused=True)

        graph = make_fx(step)(list(parameters.values()), inputs)
    return len(graph.graph.nodes)


def grid_of(case: Case) -> DeviceMesh:
    return DeviceMesh(
        torch.arange(case.grid[0] * case.grid[1]),
        mesh_shape=case.grid,
        mesh_alpha=(25e-6, 10e-6),
        mesh_beta=(1 / 50e9, 1 / 450e9),
    )


def program(case: Case) -> Solution:
    """From the model to what each rank executes."""
    model, batch = build(case)
    graph = trace_model(model, **batch)
    solution = solve_solution(build_strategy_constructor(graph, grid_of(case), model=model))
    PlannedRun(model, graph, solution.sharded, grid_of(case).mesh)
    return solution


def timed(function: Callable[[Case], Any], case: Case) -> tuple[float, Any]:
    """CPU seconds, which other jobs of a machine disturb least, and the result."""
    gc.collect()
    begin = time.process_time()
    result = function(case)
    return time.process_time() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=["gpt2"])
    arguments = parser.parse_args()
    warm = Case("first imports", 1, 64, 4, 16, 8, (2, 4))
    rows = []
    with fake_world(0, 8):
        timed(program, warm)
        timed(bare_trace, warm)
        for case in (CASES[name] for name in arguments.cases):
            bare, nodes = timed(bare_trace, case)
            found, solution = timed(program, case)
            print(
                f"{case.name}: {len(solution)} operations, {nodes} in the bare trace;"
                f" {solution.plan.cost * 1e3:.4g} ms a step, gap {solution.plan.gap:.1e}"
            )
            rows.append(Row(case.name, found, bare, "bare make_fx", "s"))
    print(show(rows))


if __name__ == "__main__":
    main()
