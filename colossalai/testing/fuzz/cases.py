"""A case: a model, an optimizer, habits, a plan, and maybe a second plan that goes on from the first one's
checkpoint.

A case is plain data and follows from a seed and a number, so it can be repeated, stored and made smaller.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from colossalai.testing.fuzz.habits import Habit, fitting, random_habits
from colossalai.testing.fuzz.models import BlockSpec, ModelSpec, random_model
from colossalai.testing.fuzz.plans import PlanSpec, random_plan

ROWS = 24  # of a batch: 1, 2, 3 and 4 ranks and as many parts divide it


@dataclass
class OptimizerSpec:
    """An optimizer: the expression of its class and its options."""

    kind: str = "torch.optim.SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    groups: bool = False  # matrices and the rest in two groups
    trainable_only: bool = False


@dataclass
class Case:
    """A training to try: the model, its plans and habits, and their order."""

    model: ModelSpec
    a: PlanSpec
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    steps: int = 3
    accumulate: int = 1
    scheduler: bool = False
    squares: bool = False  # the loss: squared errors in the place of cross entropy
    habits: list[Habit] = field(default_factory=list)
    save_at: int | None = None
    b: PlanSpec | None = None
    file: bool = False  # checkpoints are files of ``save_checkpoint``, not folders of ``booster.save``
    seed: int = 0
    index: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        data = json.loads(text)
        model = data.pop("model")
        model["blocks"] = [BlockSpec(**block) for block in model["blocks"]]
        b = data.pop("b")
        return cls(
            model=ModelSpec(**model),
            a=PlanSpec(**data.pop("a")),
            b=None if b is None else PlanSpec(**b),
            optimizer=OptimizerSpec(**data.pop("optimizer")),
            habits=[Habit(**habit) for habit in data.pop("habits")],
            **data,
        )

    @property
    def plans(self) -> list[PlanSpec]:
        return [self.a] if self.b is None else [self.a, self.b]

    @property
    def half(self) -> bool:
        return any(plan.precision != "fp32" for plan in self.plans)

    def describe(self) -> str:
        """The case in one line."""
        inner = " ".join(b.kind for b in self.model.blocks)
        extras = [h.name for h in self.habits] + [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        plans = " -> ".join(p.describe() for p in self.plans)
        habits = f"; {', '.join(extras)}" if extras else ""
        return f"{plans}; {self.optimizer.kind.split('.')[-1]}; {inner}{habits}"


def random_case(seed: int, index: int, ranks: list[int]) -> Case:
    """The case ``index`` of ``seed``."""
    r = Random(f"{seed}:{index}")
    most = max(ranks)
    spread = r.choices(["data", "tensor", "pipeline"], [6, 1, 2] if most > 1 else [1, 0, 0])[0]
    model = random_model(r, spread)
    steps = r.randint(2, 5)
    case = Case(
        model=model,
        a=random_plan(r, model, ranks, spread),
        optimizer=_random_optimizer(r),
        steps=steps,
        accumulate=r.choices([1, 2, 3], [6, 2, 1])[0],
        scheduler=r.random() < 0.25,
        squares=r.random() < 0.3,
        habits=random_habits(r, steps),
        seed=seed,
        index=index,
    )
    if r.random() < 0.5:
        case.save_at = r.randint(1, steps - 1)
        other = r.choice([spread, "data"])
        case.b = copy.deepcopy(case.a) if r.random() < 0.3 else random_plan(r, model, ranks, other)
    case.file = any(plan.engine for plan in case.plans) or r.random() < 0.1
    if any(plan.pipeline > 1 for plan in case.plans):
        case.accumulate = 1
    case.habits = fitting(case.habits, case.plans)
    if case.accumulate > 1 and model.has("Branch") and any(plan.plugin == "ddp" for plan in case.plans):
        # torch's DDP takes the first pass under no_sync for the one whose loss was thrown away, and raises
        # where it takes another branch
        case.habits = [habit for habit in case.habits if habit.name != "forward only"]
    return case


def _random_optimizer(r: Random) -> OptimizerSpec:
    # A large eps: Adam would blow the rounding errors of gradients that are zero in theory up to full-sized
    # steps.
    adam = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
    kind, options = r.choice(
        [
            ("torch.optim.SGD", {"lr": 0.1}),
            ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
            ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
            ("torch.optim.AdamW", adam),
            ("torch.optim.Adam", {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
            ("colossalai.nn.optimizer.HybridAdam", adam),
            ("colossalai.nn.optimizer.HybridAdam", adam),
            ("colossalai.nn.optimizer.FusedAdam", adam),
            ("colossalai.nn.optimizer.FusedSGD", {"lr": 0.1, "momentum": 0.9}),
            ("colossalai.nn.optimizer.Lamb", {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}),
            ("torch.optim.RMSprop", {"lr": 0.01, "eps": 1e-2}),
            ("torch.optim.Adagrad", {"lr": 0.05, "eps": 1e-2}),
        ]
    )
    return OptimizerSpec(kind, dict(options), groups=r.random() < 0.25, trainable_only=r.random() < 0.4)
