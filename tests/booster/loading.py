"""A small model in training under every plan that keeps weights in more than one place, and every way to load
into it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision, FP16NaiveMixedPrecision
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.nn.optimizer import FusedLAMB, FusedSGD, HybridAdam
from colossalai.zero.gemini import GeminiDDP
from tests import shared_memory

WORDS, WIDTH = 16, 8
SMALL = 128 / 1024**2  # MB of a chunk, so that the model has several
# bytes of the host, by whether it is fp32 and the number of ranks: so that states rest on the disk, and
# mostly weights too
HOST = {(True, 1): 14700, (True, 2): 9000, (False, 1): 12000, (False, 2): 7000}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
    "hybrid": lambda groups: HybridAdam(groups, lr=1e-2, eps=1e-4),
    "sgd": lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9),
    "lamb": lambda groups: FusedLAMB(groups, lr=1e-2, eps=1e-4, max_grad_norm=0),
}


@dataclass(frozen=True)
class Plan:
    kind: str
    """``zero1``, ``zero2``, ``gemini`` or ``ddp``, ``fsdp``."""
    precision: str
    optimizer: str
    ranks: int
    rests: str = ""
    """``offload`` under ZeRO; under Gemini the policy, ``disk``, or ``early`` for updates in the backward
    pass.
    """

    def __str__(self) -> str:
        words = (self.kind, self.rests, self.precision, self.optimizer, str(self.ranks))
        return "-".join(word for word in words if word)

    @property
    def is_possible(self) -> bool:
        if self.kind == "gemini" and self.optimizer == "lamb" and self.ranks > 1:
            return False  # needs whole parameters
        if self.rests == "early" and self.precision == "fp16" and self.optimizer != "hybrid":
            return False  # updates could not be taken back
        return not (self.rests == "disk" and self.optimizer == "torch" and self.precision != "fp32")

    def booster(self, folder: Path) -> Booster:
        if self.kind in ("zero1", "zero2"):
            plugin: Any = LowLevelZeroPlugin(
                stage=int(self.kind[-1]),
                precision=self.precision,
                initial_scale=2**4,
                reduce_bucket_size_in_m=100 / 2**20,
                cpu_offload=self.rests == "offload",
            )
            return Booster("cpu", plugin=plugin)
        if self.kind == "gemini":
            options: dict[str, Any] = {}
            if self.rests == "disk":
                options = {"disk_dir": folder, "host_capacity": HOST[self.precision == "fp32", self.ranks]}
            elif self.rests == "early":
                options = {"update_in_backward": True}
            policy = self.rests if self.rests == "auto" else "cpu"
            plugin = GeminiPlugin(
                "cpu",
                policy,
                precision=self.precision,
                initial_scale=2**4,
                min_chunk_size_mb=SMALL,
                search_range_mb=SMALL,
                **options,
            )
            return Booster(plugin=plugin)
        precision: Any = {
            "fp32": None,
            "fp16": FP16NaiveMixedPrecision(initial_scale=2**4),
            "bf16": BF16MixedPrecision(half_weights=True),
        }[self.precision]
        plugin = TorchDDPPlugin(find_unused_parameters=True) if self.kind == "ddp" else TorchFSDPPlugin()
        return Booster("cpu", precision, plugin)


def _plans() -> Iterator[Plan]:
    precisions, optimizers = ("fp32", "bf16", "fp16"), tuple(OPTIMIZERS)
    kinds = [("zero1", ""), ("zero2", ""), ("zero1", "offload"), ("zero2", "offload")]
    kinds += [("gemini", rests) for rests in ("cpu", "auto", "disk", "early")] + [("ddp", "")]
    for precision, optimizer, (kind, rests), ranks in product(precisions, optimizers, kinds, (1, 2)):
        plan = Plan(kind, precision, optimizer, ranks, rests)
        if plan.is_possible:
            yield plan


PLANS = list(_plans())


class Net(nn.Module):
    """Tied weights, sizes that nothing divides, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(self.norm(x + self.block(x)) + self.frozen)


def batch(step: int) -> Tensor:
    return torch.randint(WORDS, (12, 5), generator=torch.Generator().manual_seed(step))


def launch() -> None:
    shared_memory.register()
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)


class Job:
    """The model in training under ``plan`` on this rank."""

    def __init__(self, plan: Plan, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        model = Net()
        self.booster = plan.booster(folder)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3},
        ]
        boosted = self.booster.boost(model, OPTIMIZERS[plan.optimizer](groups))
        self.model: Any = boosted.model
        self.optimizer: Any = boosted.optimizer

    def train(self, steps: range, everywhere: bool = False) -> list[float]:
        """The losses of this rank's part of the data, or the mean over ranks."""
        losses = []
        for step in steps:
            words = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
            scores = self.model(words)[:, :-1].float()
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            if everywhere:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copies of all weights, and of all that the optimizer would save: masters too."""
        every_rank = {"only_rank_0": False} if isinstance(self.model, GeminiDDP) else {}
        weights = dict(self.model.state_dict(**every_rank))
        return copy.deepcopy(weights), copy.deepcopy(self.optimizer.state_dict())

    def truth(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``state``, of the groups only what changes: loading adds options of torch that a new optimizer
        lacks.
        """
        weights, states = self.state()
        return weights, {**states, "param_groups": [group["lr"] for group in states["param_groups"]]}

    @torch.no_grad()
    def write(self, weights: dict[str, Tensor]) -> None:
        """Write to the parameters in place, as scripts do."""
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where two nested states differ; values are compared to the last bit."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            yield f"{path} has {sorted(map(str, found))}, not {sorted(map(str, expected))}"
            return
        for key in expected:
            yield from differences(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            yield from differences(a, b, f"{path}/{i}")
    elif isinstance(expected, Tensor):
        if not torch.equal(found, expected):
            off = (found.double() - expected.double()).abs().max().item()
            yield f"{path} is off by {off:.2e}"
    elif found != expected:
        yield f"{path} is {found!r}, not {expected!r}"
