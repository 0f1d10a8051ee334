"""Random models: a small description in plain data, and the lines of Python that build the model from it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from random import Random
from typing import Any

from colossalai.testing.fuzz import blocks

WIDTHS = (3, 4, 6, 8, 10)
# block -> the arguments after the width; the second list needs a sequence
_ANYWHERE = {
    "Mlp": lambda r, d: [d, r.choice([4, 8, 12])],
    "NormLayer": lambda r, d: [d],
    "Batch": lambda r, d: [d],
    "InPlace": lambda r, d: [d],
    "InPlaceView": lambda r, d: [d],
    "Scale": lambda r, d: [],
    "Unused": lambda r, d: [d],
    "Branch": lambda r, d: [d],
    "Twice": lambda r, d: [d],
    "Borrowed": lambda r, d: [d],
    "Own": lambda r, d: [d],
    "Recomputed": lambda r, d: [d, r.random() < 0.3],
    "Normed": lambda r, d: [d],
    "Drop": lambda r, d: [],
}
_SEQUENCE = {
    "AttentionLayer": lambda r, d: [d, 2 if d % 2 == 0 else 1],
    "TorchAttention": lambda r, d: [d, 2 if d % 2 == 0 else 1],
    "Recurrent": lambda r, d: [d, r.choice(["GRU", "LSTM"])],
    "Convolution": lambda r, d: [d],
}
# blocks that do something else on a part of the batch than on the whole of it
_SEE_THE_BATCH = {"Batch", "Branch"}


@dataclass
class BlockSpec:
    """One layer: the name of its class in ``blocks`` and the arguments of its constructor."""

    kind: str
    args: list[Any]
    uid: int = 0
    frozen: bool = False


@dataclass
class ModelSpec:
    """A model as plain data.

    ``shared`` pairs blocks that are one module, ``tied`` the head and the embedding.
    """

    blocks: list[BlockSpec]
    root: str = "Sequential"  # or Net
    tokens: bool = False
    sequence: bool = False
    inputs: int = 5  # the width of the input, or the number of words
    classes: int = 3
    tied: bool = False
    shared: list[list[int]] = field(default_factory=list)
    dtype: str = "float32"

    @property
    def by_parts(self) -> bool:
        """Whether the serial model must see the batch in the parts that replicas see."""
        return any(b.kind in _SEE_THE_BATCH for b in self.blocks)

    @property
    def leaves_unused(self) -> bool:
        """Whether a parameter may get no gradient in a pass."""
        return any(b.kind in ("Unused", "Branch") for b in self.blocks)

    @property
    def can_be_cut(self) -> bool:
        """Whether there is a block for tensor parallelism."""
        return self.has("Mlp")

    def rules(self) -> dict[str, str]:
        """What tensor parallelism in 1D cuts: the path of a module and the expression of its rule."""
        found: dict[str, str] = {}
        for block, name in zip(self.blocks, self.names().values(), strict=True):
            if block.kind == "Mlp":
                found |= {f"{name}.up": "Cut('expand')", f"{name}.down": "Cut('contract')"}
            if block.kind == "Words":
                found[f"{name}.table"] = "Table()"
                if self.tied:
                    found[f"{list(self.names().values())[-1]}.proj"] = "ScoreHead()"
        return found

    def has(self, *kinds: str) -> bool:
        return any(b.kind in kinds for b in self.blocks)

    def names(self) -> dict[int, str]:
        """The name of each block in the model, by uid."""
        prefix = "layers." if self.root == "Net" else ""
        return {b.uid: f"{prefix}{i}" for i, b in enumerate(self.blocks)}

    def path(self, uid: int) -> str:
        """The expression of a block in a script."""
        at = next(i for i, b in enumerate(self.blocks) if b.uid == uid)
        return f"model.layers[{at}]" if self.root == "Net" else f"model[{at}]"


def random_model(r: Random, spread: str = "data") -> ModelSpec:
    """Draw a model; one for tensor parallelism has layers to cut, one for a pipeline is a ``Sequential`` that
    is long enough.
    """
    sequence = r.random() < 0.5
    tokens = sequence and r.random() < 0.6
    d = r.choice(WIDTHS)
    inputs, classes = r.choice([5, 6, 11]), r.choice([3, 5])
    tied = tokens and r.random() < 0.4
    kinds = dict(_ANYWHERE) | (_SEQUENCE if sequence else {})
    if spread == "pipeline":
        kinds = {k: v for k, v in kinds.items() if k not in ("Branch", "Drop")}
    least = 3 if spread == "pipeline" else 1
    middle = [
        BlockSpec(kind := r.choice(sorted(kinds)), kinds[kind](r, d)) for _ in range(r.randint(least, 5))
    ]
    if spread == "tensor":
        middle[r.randrange(len(middle))] = BlockSpec("Mlp", [d, r.choice([4, 8, 12])])
    first = BlockSpec("Words", [inputs, d]) if tokens else BlockSpec("InputLayer", [inputs, d])
    chain = [first, *middle, BlockSpec("OutputLayer", [d, inputs if tied else classes])]
    for uid, block in enumerate(chain):
        block.uid = uid
        block.frozen = r.random() < 0.08 and 0 < uid < len(chain) - 1
    spec = ModelSpec(
        chain,
        root="Net" if spread != "pipeline" and r.random() < 0.4 else "Sequential",
        tokens=tokens,
        sequence=sequence,
        inputs=inputs,
        classes=inputs if tied else classes,
        tied=tied,
    )
    if len(middle) > 1 and r.random() < 0.15:
        a, b = r.sample(range(1, len(middle) + 1), 2)
        spec.shared.append([min(a, b), max(a, b)])
    return spec


def sources(spec: ModelSpec) -> str:
    """The classes that ``spec`` uses, as text."""
    kinds = sorted({b.kind for b in spec.blocks} | ({"Net"} if spec.root == "Net" else set()))
    return "\n\n".join(inspect.getsource(getattr(blocks, kind)) for kind in kinds)


def build_lines(spec: ModelSpec) -> list[str]:
    """The body of ``build(seed)``."""
    root = "nn.Sequential" if spec.root == "Sequential" else "Net"
    calls = [f"{b.kind}({', '.join(repr(a) for a in b.args)})" for b in spec.blocks]
    lines = ["torch.manual_seed(seed)", f"model = {root}(", *(f"    {call}," for call in calls), ")"]
    here = {b.uid for b in spec.blocks}
    held = "model.layers" if spec.root == "Net" else "model"
    order = [b.uid for b in spec.blocks]
    for a, b in spec.shared:
        if a in here and b in here:
            lines.append(f"{held}[{order.index(b)}] = {held}[{order.index(a)}]")
    if spec.tied:
        lines.append(f"{held}[{len(order) - 1}].proj.weight = {held}[0].table.weight")
    lines += [f"{spec.path(b.uid)}.requires_grad_(False)" for b in spec.blocks if b.frozen]
    if spec.dtype != "float32":
        lines.append(f"model = model.to(torch.{spec.dtype})")
    return [*lines, "return model"]
