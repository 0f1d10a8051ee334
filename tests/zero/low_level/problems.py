"""A small model with everything that makes ZeRO difficult, and its training, serial and under the plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.mesh.collectives import count_communication
from colossalai.nn.optimizer import FusedSGD, HybridAdam
from colossalai.zero.states import sliced_states
from tests import shared_memory

SAMPLES = 16


class Net(nn.Module):
    """Tied weights, sizes that nothing divides, a frozen and an unused
    parameter, and a block that is used twice.
    """

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.embed = nn.Embedding(11, 7)
        self.block = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = x + (
                checkpoint(self.block, x, use_reentrant=self.recompute == "reentrant")
                if self.recompute
                else self.block(x)
            )
        return self.head(self.norm(x) * self.scale + self.frozen)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(11, (2, SAMPLES, 3), generator=generator) for _ in range(steps)]
    return [(pair[0], pair[1]) for pair in draw]


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3},
    ]


# a larger eps than usual, as in colossalai.testing.parity: Adam makes whole steps of rounding errors
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=1e-2, eps=1e-4),
    "hybrid": lambda m: HybridAdam(groups(m), lr=1e-2, eps=1e-4),
    "sgd": lambda m: FusedSGD(groups(m), lr=0.1, momentum=0.9),
    "torch_sgd": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int = 1
    precision: str = "fp32"
    accumulate: int = 1
    clip: float = 0.0
    recompute: str = ""
    offload: bool = False
    nvme: float = 0.0
    optimizer: str = "hybrid"
    overlap: bool = True
    bucket: int = 100
    steps: int = 3
    device: str = "cpu"
    synced: bool = False
    """Reduce gradients in every pass of an accumulation."""

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in vars(self).items() if value not in ("", False, 0.0)]
        return ",".join(words)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def launch(backend: str = "gloo") -> None:
    shared_memory.register()
    colossalai.launch_from_torch(config={}, backend=backend, verbose=False)


def boost(case: Case, model: nn.Module, **options: Any) -> tuple[Booster, Any, Any]:
    plugin = LowLevelZeroPlugin(
        stage=case.stage,
        precision=case.precision,
        max_norm=case.clip,
        reduce_bucket_size_in_m=case.bucket / 2**20,
        overlap_communication=case.overlap,
        cpu_offload=case.offload,
        initial_scale=options.pop("initial_scale", 2**4),
        **options,
    )
    booster = Booster(device=case.device, plugin=plugin)
    optimizer = OPTIMIZERS[case.optimizer](model)
    if case.nvme:
        optimizer.offload_states(case.nvme, None)  # type: ignore[attr-defined]
    boosted = booster.boost(model, optimizer)
    return booster, boosted.model, boosted.optimizer


def train_part(
    case: Case, booster: Booster, model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]
) -> Tensor:
    """The passes of one step on this rank's part of a batch; returns the loss of the whole."""
    own = [t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch]
    total = torch.zeros((), device=case.device)
    for i in range(case.accumulate):
        part = [t.chunk(case.accumulate)[i] for t in own]
        if case.synced or i == case.accumulate - 1:
            loss = loss_of(model, *part) / case.accumulate
            booster.backward(loss, optimizer)
        else:
            with booster.no_sync(model), count_communication() as log:
                loss = loss_of(model, *part) / case.accumulate
                booster.backward(loss, optimizer)
            assert not log.transfers, "gradients that accumulate must not travel"
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def gradients(optimizer: Any) -> dict[int, Tensor]:
    """The averaged gradients, whole, by the number of their parameter."""
    optimizer.unscale_grad()
    found = sliced_states(
        optimizer._numbered,
        lambda piece: {} if piece.value.grad is None else {"grad": piece.value.grad},
        optimizer.group,
    )
    return {
        n: s["grad"].full_tensor() if hasattr(s["grad"], "full_tensor") else s["grad"]
        for n, s in found.items()
    }


def close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    got, expected = got.cpu(), expected.cpu()
    error = (got.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1e-6)
    assert error <= tolerance * scale, f"{what}: off by {error:.2e} of {scale:.2e}"


def check_equal_to_memory(case: Case) -> None:
    """The same to the last bit, whether states rest on the disk or not."""
    runs = []
    for nvme in (case.nvme, 0.0):
        booster, model, optimizer = boost(
            replace(case, nvme=nvme), Net(case.recompute).to(DTYPES[case.precision])
        )
        losses = []
        for batch in batches(case.steps):
            losses.append(train_part(case, booster, model, optimizer, batch))
            optimizer.step()
            optimizer.zero_grad()
        runs.append((torch.stack(losses), *model.parameters()))
    for got, expected in zip(*runs, strict=True):
        assert torch.equal(got, expected)


def check_case(case: Case) -> None:
    """Train under the plugin beside the serial model, and compare loss, gradients, norm and weights."""
    dtype = DTYPES[case.precision]
    loss_limit, limit = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 1e-1)
    serial, model = (Net(case.recompute).to(case.device, dtype) for _ in range(2))
    plain = OPTIMIZERS[case.optimizer](serial)
    if dtype != torch.float32 and case.optimizer in ("adamw", "torch_sgd"):
        from colossalai.amp.naive_amp import FP16Optimizer
        from colossalai.amp.naive_amp.grad_scaler import ConstantGradScaler

        plain = FP16Optimizer(plain, ConstantGradScaler(1))
    order = [p for g in plain.param_groups for p in g["params"]]
    trained = plain.trained_parameters() if hasattr(plain, "trained_parameters") else order
    booster, model, optimizer = boost(case, model)
    assert [list(p.shape) for p in model.parameters()] == [list(p.shape) for p in serial.parameters()]
    for step, on_host in enumerate(batches(case.steps)):
        batch = (on_host[0].to(case.device), on_host[1].to(case.device))
        expected = loss_of(serial, *batch)
        expected.backward()
        got = train_part(case, booster, model, optimizer, batch)
        close(f"loss at step {step}", got, expected.detach(), loss_limit)
        if step < 2:
            wanted = {i: p.grad for i, p in enumerate(_by_number(plain, trained)) if p.grad is not None}
            found = gradients(optimizer)
            assert found.keys() == wanted.keys()
            for number, grad in wanted.items():
                close(f"gradient {number} at step {step}", found[number] * _factor(optimizer), grad, limit)
        grads = [p.grad.float() for p in trained if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        if case.clip:
            nn.utils.clip_grad_norm_(trained, case.clip)
        plain.step()
        optimizer.step()
        if case.clip:
            close(f"norm at step {step}", optimizer.grad_norm, norm, limit)
        plain.zero_grad()
        optimizer.zero_grad()
    for (name, got_weight), weight in zip(model.named_parameters(), serial.parameters(), strict=True):
        close(f"weight {name}", got_weight.detach(), weight.detach(), limit)


def _factor(optimizer: Any) -> float:
    return float(optimizer.pending_factor)


def _by_number(plain: Any, trained: list[Tensor]) -> list[Tensor]:
    """The parameters in the order of the groups, frozen ones too."""
    if not hasattr(plain, "masters"):
        return [p for g in plain.param_groups for p in g["params"]]
    weights = plain.masters.weights_by_master()
    return [weights.get(p, p) for g in plain.param_groups for p in g["params"]]
