"""On a GPU that ranks share: models with cut sequences equal the serial ones, by the kernels of the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.attention import kernels
from colossalai.testing import spawn
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import BF16, FP32, Problem, check_plan
from tests.nn.policies.sequence_cases import Case
from tests.rows.plans import sgd
from tests.titans import cut_sequences

pytestmark = pytest.mark.gpu

CASES = (Case("gpt2"), Case("llama", "padded"), Case("llama", "packed", length=12))
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"sequence": 2}),
    "ulysses": (2, {"sequence": {"size": 2, "attention": "ulysses"}}),
    "ring-1d": (4, {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}}),
}


class GpuRun(BoosterRun):
    def build(self) -> nn.Module:
        model = super().build()
        return colossalai.nn.parallelize(model) if hasattr(model, "config") else model


def on_gpu(problem: Problem, dtype: torch.dtype) -> Problem:
    return Problem(
        build=lambda: problem.build().to("cuda", dtype),
        batches=[tree_map_only(Tensor, Tensor.cuda, batch) for batch in problem.batches],
        loss=problem.loss,
        optimizer=sgd,
    )


def _launch(parallel: dict[str, Any]) -> None:
    torch.cuda.set_device(0)
    colossalai.launch_from_torch({"parallel": parallel}, backend="gloo", verbose=False)


def _models(rank: int, world_size: int, port: int, parallel: dict[str, Any]) -> None:
    task = on_gpu(cut_sequences.problem("gpt", 13, "left"), torch.float32)
    given, labels = task.batches[0]
    expected = cut_sequences.by_torch("gpt", task.build()(**given), labels)  # built before the launch: serial
    _launch(parallel)
    run = GpuRun(task, Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32")))
    loss = task.loss(run.model, task.batches[0])
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    for case in CASES:
        check_plan(
            on_gpu(case.problem(2), torch.float32),
            lambda p: GpuRun(p, Booster(plugin=TorchDDPPlugin())),
            tolerance=FP32,
        )


@pytest.mark.parametrize("plan", PLANS)
def test_models_equal_serial_ones(plan: str) -> None:
    ranks, parallel = PLANS[plan]
    spawn(_models, ranks, parallel=parallel)


def _half(rank: int, world_size: int, port: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _launch({"sequence": 2})
    used: set[str] = set()
    find = kernels.find_kernel

    def noting(*args: Any) -> Any:
        found = find(*args)
        used.add("none" if found is None else found.name)
        return found

    kernels.find_kernel = noting
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    ids = torch.randint(128, (2, 512), generator=torch.Generator().manual_seed(1))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    task = Problem(
        build=build,
        batches=[{"input_ids": ids, "labels": ids, "use_cache": False}],
        loss=lambda model, batch: model(**batch).loss,
    )
    check_plan(
        on_gpu(task, torch.bfloat16),
        lambda p: GpuRun(p, Booster(plugin=TorchDDPPlugin())),
        tolerance=BF16,
    )
    assert used & {"cudnn", "flash"}, f"the fast kernels are not used, but {used}"


def test_fast_kernels_in_half_precision() -> None:
    spawn(_half, 2)
