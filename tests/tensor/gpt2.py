"""Page 10 of the documents: Hugging Face GPT-2 made Megatron-parallel by one spec per parameter."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from colossalai.tensor import (
    ColoInitContext,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossalai.testing.parity import PlacedRun, Problem
from tests.documents.pages import code
from tests.documents.scripts import run

VOCABULARY, SEQUENCE = 37, 8  # the vocabulary is odd on purpose: the page never cuts it
SIZES = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_seq_len": 16,
    "vocab_size": VOCABULARY,
}


@cache
def page() -> dict[str, Any]:
    """The classes and functions of page 10."""
    return run(code("10.model"), code("10.split"), code("10.gemini"))


def tensor_parallelize(model: nn.Module, pg: ProcessGroup) -> None:
    """The loop of page 42, for parameters that may begin their lives cut."""
    by_column, by_row = page()["split_param_col_tp1d"], page()["split_param_row_tp1d"]
    for mn, module in model.named_modules():
        for pn, param in module.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            param.set_dist_spec(ReplicaSpec())
            if "mlp.c_fc" in mn:
                by_column(param, pg)
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in mn:
                if "weight" in pn:
                    by_row(param, pg)
            elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
                by_column(param, pg)
            param.visited = True


def build(device: str = "cpu", dropout: float = 0.0, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = page()["GPTLMModel"](**{**SIZES, **sizes})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model.to(device)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    torch.manual_seed(2)  # dropout
    return page()["GPTLMLoss"]()(model(ids, torch.ones_like(ids)), ids)


def problem(device: str = "cpu", **options: Any) -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (4, SEQUENCE), generator=generator).to(device) for _ in range(3)]
    return Problem(build=lambda: build(device, **options), batches=batches, loss=loss)


class ColoRun(PlacedRun):
    """``PlacedRun`` with copies on the dp ranks: each takes its part of the batch, and gradients are
    averaged.
    """

    def __init__(self, problem: Problem, model: nn.Module, pg: ProcessGroup) -> None:
        super().__init__(problem, model, pg.mesh, problem.loss)
        self.pg = pg

    def forward_backward(self, batch: Tensor) -> Tensor:
        own = batch.chunk(self.pg.dp_world_size())[self.pg.dp_local_rank()]
        loss = super().forward_backward(own)
        for value in [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]:
            dist.all_reduce(value, group=self.pg.dp_process_group())
            value /= self.pg.dp_world_size()
        return loss


def page_10(problem: Problem, tp: int, device: str = "cpu") -> ColoRun:
    done = run(
        code("10.initialize", ("'cpu'", "device"), ("GPTLMModel()", "build()")),
        code("10.group", ("dist.get_world_size()", "tp")),
        code("10.split"),
        code("10.parallelize"),
        torch=torch,
        build=problem.build,
        device=device,
        tp=tp,
    )
    return ColoRun(problem, done["model"], done["pg"])


def page_42(problem: Problem, tp: int) -> ColoRun:
    pg = ProcessGroup(tp_degree=tp)
    with ColoInitContext(device="cpu", default_dist_spec=ShardSpec([-1], [tp]), default_pg=pg):
        model = problem.build()
    tensor_parallelize(model, pg)
    return ColoRun(problem, model, pg)
