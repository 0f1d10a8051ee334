"""What the tests of Gemini share: small models with everything that is difficult, and training beside the
serial model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.mesh.gradient_norm import clip_factor
from colossalai.nn.optimizer import FusedSGD, HybridAdam
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from colossalai.zero.states import sliced_states
from tests import shared_memory

WIDTH, WORDS, BLOCKS = 8, 24, 24
SMALL = 128 / 1024**2  # M elements: small chunks, so that an eighth of the model is several of them


def launch(rank: int, world_size: int, port: int, backend: str = "gloo") -> None:
    shared_memory.register()
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend=backend, verbose=False)


class Block(nn.Module):
    """Reads a parameter of its child, has one of its own, and one that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        # small, so that training is calm: what is chaotic has no parity after 100 steps
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.inner(self.norm(x)))
        return x + self.scale * nn.functional.linear(hidden, self.outer.weight)


class Net(nn.Module):
    """Tied weights, a frozen layer, an unused layer, attention that reads its child's parameters;
    ``reentrant`` checkpoints blocks.
    """

    def __init__(self, reentrant: bool | None = None, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.frozen(self.embed(words))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def net(reentrant: bool | None = None, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return Net(reentrant, blocks)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    scores = model(words)[:, :-1].float()
    return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def batch(step: int, size: int = 16) -> Tensor:
    return torch.randint(WORDS, (size, 6), generator=torch.Generator().manual_seed(step))


def hybrid(params: Iterable[Any]) -> torch.optim.Optimizer:
    return HybridAdam(params, lr=3e-3, weight_decay=0.1, eps=1e-4)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return FusedSGD(params, lr=0.1, momentum=0.5)


@dataclass(frozen=True)
class Case:
    """A way to train under Gemini; ``share`` is the compute tier's part of the model's weights."""

    policy: str = "cpu"
    dtype: torch.dtype = torch.float32
    share: float | None = None
    accumulate: int = 1
    clip: float = 0.0
    reentrant: bool | None = None
    early: bool = False
    nvme: float = 0.0
    undo: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_possible(self) -> bool:
        return not (self.policy == "cuda" and (self.share is not None or self.nvme))

    def __str__(self) -> str:
        return (
            f"{self.policy} {str(self.dtype)[6:]} share={self.share} accumulate={self.accumulate}"
            f" clip={self.clip} reentrant={self.reentrant} early={self.early} nvme={self.nvme}"
        )


class Training:
    """A model under Gemini on this rank."""

    def __init__(
        self,
        case: Case,
        build: Callable[..., nn.Module] = net,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = hybrid,
    ) -> None:
        self.case = case
        model = build(case.reentrant)
        if dist.is_initialized():  # ranks begin with different weights: those of the first count
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(dist.get_rank())
        self.nbytes = sum(p.numel() for p in model.parameters()) * case.dtype.itemsize
        self.capacity = None if case.share is None else int(case.share * self.nbytes)
        inner = optimizer(model.parameters())
        if case.nvme and isinstance(inner, HybridAdam):
            inner.offload_states(case.nvme, None)
        small = SMALL * case.dtype.itemsize
        options: dict[str, Any] = {"min_chunk_size_mb": small, "search_range_mb": small, "prefetch": 1}
        options |= {"compute_capacity": self.capacity, **dict(case.options)}
        self.model = GeminiDDP(model, "cpu", case.policy, dtype=case.dtype, **options)
        self.optimizer = GeminiOptimizer(
            inner,
            self.model,
            clipping_norm=case.clip,
            update_in_backward=case.early,
            undo_ratio=case.undo,
            initial_scale=2**4,
        )
        self.rank, self.ranks = self.model.chunk_manager.ranks.rank, self.model.chunk_manager.ranks.size

    def step(self, words: Tensor) -> Tensor:
        own = words.chunk(self.ranks)[self.rank]
        losses = []
        for i, part in enumerate(own.chunk(self.case.accumulate)):
            last = i == self.case.accumulate - 1
            with nullcontext() if last else self.model.no_sync():
                loss = loss_of(self.model, part) / self.case.accumulate
                self.optimizer.backward(loss)
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.stack(losses).sum()
        if self.ranks > 1:
            dist.all_reduce(total)
        self.check_memory()
        return total / self.ranks

    def check_memory(self) -> None:
        tier = self.model.chunk_manager.compute
        assert tier.used <= tier.peak <= tier.limit
        assert tier.peak > 0

    def gradients(self) -> dict[str, Tensor]:
        """The averaged gradients, whole, by name."""
        self.optimizer.give_gradients(everywhere=True)
        names = {p: n for n, p in self.model.unwrap().named_parameters()}
        numbered = self.optimizer._numbered
        found = sliced_states(
            numbered,
            lambda piece: {} if piece.value.grad is None else {"grad": piece.value.grad},
            self.optimizer.group,
        )
        return {names[numbered[i].param]: state["grad"].full_tensor() for i, state in found.items()}


class Serial:
    """The same model, as it is."""

    def __init__(
        self,
        case: Case,
        build: Callable[..., nn.Module] = net,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = hybrid,
    ) -> None:
        self.case = case
        self.model = copy.deepcopy(build(case.reentrant)).to(case.dtype)
        self.optimizer = optimizer(self.model.parameters())

    def backward(self, words: Tensor) -> Tensor:
        losses = []
        for part in words.chunk(self.case.accumulate):
            loss = loss_of(self.model, part) / self.case.accumulate
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def step(self, words: Tensor) -> Tensor:
        loss = self.backward(words)
        options = {}
        if self.case.clip and getattr(self.optimizer, "divides", False):
            # in bf16 torch would round the norm, and the gradients once more
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
            factor = clip_factor(torch.linalg.vector_norm(torch.stack(norms)), self.case.clip)
            options = {} if float(factor) == 1.0 else {"div_scale": 1.0 / float(factor)}
        elif self.case.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.optimizer.step(**options)
        self.optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class Tolerance:
    """Of losses, and of weights in parts of the largest of their tensor."""

    loss: float
    weights: float


EXACT = Tolerance(0.0, 0.0)
TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-4), torch.bfloat16: Tolerance(1e-2, 1e-1)}
BATCHES = 4  # again and again, to be learnt


@dataclass(frozen=True)
class Course:
    """What a training gave: the loss of every step, the weights after the last."""

    losses: list[Tensor]
    weights: dict[str, Tensor]


@lru_cache(maxsize=8)  # of many cases in turn, most have the same serial training
def serial_course(case: Case, steps: int, **options: Any) -> Course:
    serial = Serial(case, **options)
    return Course([serial.step(batch(step % BATCHES)) for step in range(steps)], serial.model.state_dict())


@lru_cache(maxsize=2)
def course(case: Case, steps: int, **options: Any) -> Course:
    run = Training(case, **options)
    losses = [run.step(batch(step % BATCHES)) for step in range(steps)]
    return Course(losses, run.model.state_dict(only_rank_0=False))


def compare(case: Case, steps: int = 4, **options: Any) -> Training:
    """Train both, compare losses and weights: on one rank they are the same to the last bit, several add in
    another order.

    In bf16 Adam would make whole steps of gradients that are nothing but the rounding of that order.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if case.dtype is not torch.float32 and not is_alone:
        if case.nvme:
            return equal_courses(case, replace(case, nvme=0.0), steps, **options)
        options = {"optimizer": sgd, **options}
    run = Training(case, **options)
    serial = serial_course(
        Case(dtype=case.dtype, accumulate=case.accumulate, clip=case.clip), steps, **options
    )
    limit = EXACT if is_alone else TOLERANCE[case.dtype]
    for step, expected in enumerate(serial.losses):
        got = run.step(batch(step % BATCHES))
        assert (got - expected).abs() <= limit.loss * expected.abs(), (str(case), step, got, expected)
    weights = run.model.state_dict(only_rank_0=False)
    for name, expected in serial.weights.items():
        if not expected.is_floating_point():
            continue
        error = (weights[name].float() - expected.float()).abs().max()
        assert error <= limit.weights * expected.float().abs().max(), (str(case), name, float(error))
    return run


def equal_courses(case: Case, known: Case, steps: int, **options: Any) -> Training:
    """The same to the last bit, as whether states rest on the disk or not."""
    run, other = Training(case, **options), course(known, steps, **options)
    for step, expected in enumerate(other.losses):
        got = run.step(batch(step % BATCHES))
        assert torch.equal(got, expected), (str(case), step, got, expected)
    weights = run.model.state_dict(only_rank_0=False)
    for name, expected in other.weights.items():
        assert torch.equal(weights[name], expected), (str(case), name)
    return run
