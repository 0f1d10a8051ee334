"""One small model trained in a pipeline through either door, ``Engine`` or ``Booster``: what comes out, or
the words of the refusal.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.policies import Depth, Policy
from colossalai.pipeline import split_model
from tests.pipeline.plans import Block, config, launch

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}  # with their chunks
WORDS, WIDTH, STEPS, CLIP = 16, 8, 3, 0.5
SCALE = 2.0**8  # of losses: no gradient overflows
# what a config says of fp16, what a booster is given, and how both say SCALE
HALVES: dict[str, tuple[AMP_TYPE, Any, dict[str, Any]]] = {
    "fp16": (AMP_TYPE.TORCH, FP16TorchMixedPrecision, {"init_scale": SCALE}),
    "fp16_naive": (AMP_TYPE.NAIVE, FP16NaiveMixedPrecision, {"initial_scale": SCALE}),
    "fp16_apex": (AMP_TYPE.APEX, FP16ApexMixedPrecision, {"opt_level": "O2", "loss_scale": SCALE}),
}
REFUSALS = (ValueError, TypeError, RuntimeError)


class Case(NamedTuple):
    """What is trained and how; ``plugin`` is ``"none"``, ``"ddp"``, ``"fsdp"``, ``"zero1"``, ``"zero2"`` or
    ``"gemini"``.
    """

    plugin: str
    schedule: str
    tied: bool
    precision: str = "fp32"


class Outcome(NamedTuple):
    """The weights of this rank by their names in the serial model, or why they were not trained."""

    weights: dict[str, Tensor]
    refusal: str = ""


class Words(nn.Module):
    """An embedding, four blocks and a head, which may be the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(hidden).float()
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


POLICY = Policy(model_types=(), rules={}, depth=Depth(blocks="blocks", entry=("embed",)))


def batches() -> list[dict[str, Tensor]]:
    made = torch.randint(WORDS, (STEPS, 2, 16, 3), generator=torch.Generator().manual_seed(1))
    return [{"ids": ids, "labels": labels} for ids, labels in made]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@functools.cache
def serial(tied: bool, skipped: int = 0) -> dict[str, Tensor]:
    """The weights after the training of the serial model, without its first ``skipped`` steps."""
    model = Words(tied)
    optimizer = optimizer_of(model)
    for batch in batches()[skipped:]:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict()


def own_batches() -> list[dict[str, Tensor]]:
    """The part of this data-parallel rank."""
    size, rank = gpc.data_parallel_size, gpc.get_local_rank(ParallelMode.DATA)
    return [{name: tensor.chunk(size)[rank] for name, tensor in batch.items()} for batch in batches()]


def settings_of(case: Case, door: str) -> dict[str, Any]:
    settings = config(case.schedule, 2, 4, SCHEDULES[case.schedule])
    if door == "booster":
        return settings
    level = {"zero1": 1, "zero2": 2, "gemini": 3}.get(case.plugin)
    if level is not None:
        settings["zero"] = {"level": level, "precision": case.precision, "initial_scale": SCALE}
    elif case.precision != "fp32":
        mode, _, options = HALVES[case.precision]
        settings["fp16"] = {"mode": mode, **options}
    return settings | {"clip_grad_norm": CLIP}


def plugin_of(case: Case) -> Plugin | None:
    makers: dict[str, Any] = {
        "none": lambda: None,
        "ddp": TorchDDPPlugin,
        "fsdp": TorchFSDPPlugin,
        "zero1": functools.partial(LowLevelZeroPlugin, 1, case.precision, SCALE),
        "zero2": functools.partial(LowLevelZeroPlugin, 2, case.precision, SCALE),
        "gemini": functools.partial(GeminiPlugin, precision=case.precision, initial_scale=SCALE),
    }
    return makers[case.plugin]()


def run(case: Case, door: str, overflow: bool = False) -> Outcome:
    """Train ``case`` through ``door``; every rank calls it.

    With ``overflow``, the first stage has infinite gradients in the first step.
    """
    settings = settings_of(case, door)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    gpc.check_sanity()
    model = split_model(Words(case.tied), policy=POLICY)
    if overflow:
        _overflow_once(model)
    try:
        trained = (_by_engine if door == "engine" else _by_booster)(case, model)
    except REFUSALS as error:
        return Outcome({}, str(error))
    whole = {"only_rank_0": False} if case.plugin == "gemini" else {}
    state = trained.state_dict(**whole)
    return Outcome({_serial_name(n, case): _whole(t).float().cpu() for n, t in state.items()})


def _overflow_once(model: nn.Module) -> None:
    embed = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embed is None:
        return
    left = iter(range(4))  # the micro-batches of a step

    def infinite(grad: Tensor) -> Tensor:
        return grad * float("inf") if next(left, None) is not None else grad

    embed.weight.register_hook(infinite)


def _by_engine(case: Case, model: nn.Module) -> nn.Module:
    engine, *_ = colossalai.initialize(model, optimizer_of(model), verbose=False)
    for batch in own_batches():
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine.step()
    return engine.model


def _by_booster(case: Case, model: nn.Module) -> nn.Module:
    precision: Any = (
        None if case.plugin in ("zero1", "zero2", "gemini") or case.precision == "fp32" else case.precision
    )
    if precision in HALVES:
        _, kind, options = HALVES[precision]
        precision = kind(**options)
    booster = Booster(mixed_precision=precision, plugin=plugin_of(case))
    boosted, optimizer, *_ = booster.boost(model, optimizer_of(model))
    for batch in own_batches():
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        optimizer.clip_grad_by_norm(CLIP)
        optimizer.step()
    return boosted


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _serial_name(name: str, case: Case) -> str:
    return name.partition(".")[2] if SCHEDULES[case.schedule] > 1 else name
