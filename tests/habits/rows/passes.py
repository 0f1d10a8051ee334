"""Habits with forward and backward passes: accumulation, several losses, other ways to call the model,
failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.habits.habit import habit
from tests.habits.script import Script, loss_of

THEME = "Forward and backward passes"
BF16 = 3e-2


@habit(THEME, "accumulation: `loss / 2` in two backward passes, then one step")
def accumulate(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes(weight=0.5)
        s.passes(weight=0.5)
        s.step()


@habit(THEME, "accumulation under `booster.no_sync(model)`, the last pass outside of it")
def accumulate_no_sync(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        with s.no_sync():
            s.passes(weight=0.5)
        s.passes(weight=0.5)
        s.step()


@habit(THEME, "a step after passes under `no_sync` only", instead="the last pass outside of `no_sync`")
def never_sync(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        with s.no_sync():
            s.passes()
        s.step()


@habit(THEME, "`loss.backward(retain_graph=True)`, then `loss.backward()`: two passes through one forward")
def backward_twice(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch())
        if s.serial:
            loss.backward(retain_graph=True)
        else:
            s.optimizer.backward(loss, retain_graph=True)
        s.backward(loss)
        s.step()


@habit(THEME, "two losses of one forward pass, each with its own backward pass")
def two_losses(s: Script) -> None:
    s.by_hand()
    for _ in range(2):
        s.optimizer.zero_grad()
        x, y = s.batch()
        scores = s.model(x)
        first, second = F.cross_entropy(scores, y), scores.square().mean()
        if s.serial:
            first.backward(retain_graph=True)
        else:
            s.optimizer.backward(first, retain_graph=True)
        s.backward(second)
        s.step()


@habit(THEME, "two forward passes, one backward pass (contrastive and siamese losses)")
def two_forwards(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch()) + s.loss(s.batch())
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "two forward passes, then the backward passes of both, one after the other")
def two_forwards_two_backwards(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        first, second = s.loss(s.batch()), s.loss(s.batch())
        s.backward(first)
        s.backward(second)
        s.step()


@habit(THEME, "a forward pass whose loss is thrown away (a batch that is skipped)")
def forward_only(s: Script) -> None:
    s.train()
    s.mean("loss", s.loss(s.batch()))
    s.train(2)


@habit(THEME, "`model.module(x)`")
def call_module(s: Script) -> None:
    s.by_hand()
    _train_by(s, s.model if s.serial else s.model.module)


@habit(THEME, "`model.unwrap()(x)`", instead="`model(x)`")
def call_unwrapped(s: Script) -> None:
    s.by_hand()
    _train_by(s, s.unwrap())


@habit(THEME, "a method other than `forward`: `model.features(x)`", instead="a flag of `forward`")
def other_method(s: Script) -> None:
    s.by_hand()
    for _ in range(2):
        s.optimizer.zero_grad()
        x, _ = s.batch()
        loss = s.model.features(x).square().mean()
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "a part of the model by itself: `model.first(x)`, `model.head(h)`")
def call_parts(s: Script) -> None:
    s.by_hand()

    def parts(x: Tensor) -> Tensor:
        h = s.model.first(x)
        for layer in s.model.layers:
            h = layer(h)
        return s.model.head(h)

    _train_by(s, parts)


@habit(THEME, "`torch.func.functional_call(model, dict(model.named_parameters()), x)`")
def functional(s: Script) -> None:
    s.by_hand()
    _train_by(s, lambda x: torch.func.functional_call(s.model, dict(s.model.named_parameters()), (x,)))


@habit(THEME, "a part that takes no part in some steps", model="branching")
def unused_part(s: Script) -> None:
    for branch in (True, False, True):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch(), branch=branch)
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "a branch that only some ranks take", model="branching", breaks=True)
def branch_by_rank(s: Script) -> None:
    s.by_hand()
    for _ in range(3):
        s.optimizer.zero_grad()
        x, y = s.batch()
        if s.replicas > 1 or s.serial:
            halves = [(x, y)] if not s.serial else list(zip(x.chunk(2), y.chunk(2), strict=True))
            losses = [
                loss_of("branching", s.model, half, branch=(number if s.serial else s.rank) == 0)
                for number, half in enumerate(halves)
            ]
        else:  # ranks that share a model get the same batch, of which each half goes its way
            losses = [
                loss_of("branching", s.model, half, branch=number == 0)
                for number, half in enumerate(zip(x.chunk(2), y.chunk(2), strict=True))
            ]
        loss = torch.stack(losses).mean()
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(
    THEME,
    "`zero_grad(set_to_none=False)`, then passes that leave out a layer (its momentum goes on)",
    model="branching",
    instead="`zero_grad()`",
)
def zeros_for_a_layer(s: Script) -> None:
    s.by_hand()
    for branch in (True, True, False, False):
        s.optimizer.zero_grad(set_to_none=False)
        s.backward(loss_of("branching", s.model, s.batch(), branch=branch))
        s.step()


@habit(THEME, "a last batch of other sizes on each rank (the mean of the ranks' means)")
def uneven_batch(s: Script) -> None:
    s.by_hand()
    s.train()
    s.optimizer.zero_grad()
    x, y = s.batch()
    if s.replicas > 1:
        keep = 3 if s.rank else 4
        loss = s.loss((x[:keep], y[:keep]))
    else:
        loss = (s.loss((x[:4], y[:4])) + s.loss((x[4:7], y[4:7]))) / 2
    s.mean("loss", loss)
    s.backward(loss)
    s.step()


@habit(
    THEME,
    "every rank reads its own part of the data, whatever the plan (`DistributedSampler` over all ranks)",
)
def own_part_of_data(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        x, y = s.batch()
        if s.replicas == 1 and not s.serial:
            x, y = x.chunk(s.world_size)[s.rank], y.chunk(s.world_size)[s.rank]
        s.passes((x, y))
        s.step()


@habit(THEME, "a loss that is nan")
def nan_loss(s: Script) -> None:
    s.train()
    s.optimizer.zero_grad()
    s.passes(weight=float("nan"))
    s.step()


@habit(THEME, '`model(x, labels=y)["loss"]`: the loss comes in a dict', model="losing")
def loss_in_dict(s: Script) -> None:
    s.by_hand()
    for _ in range(3):
        s.optimizer.zero_grad()
        x, y = s.batch()
        loss = s.model(x, labels=y)["loss"]
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "`model(input_ids=ids, labels=ids).loss`: a `ModelOutput` of Hugging Face", model="gpt2")
def model_output(s: Script) -> None:
    s.train(3)


@habit(THEME, "evaluation in between: `model.eval()` and `torch.no_grad()`")
def evaluate(s: Script) -> None:
    s.by_hand()
    for _ in range(2):
        s.train()
        s.model.eval()
        with torch.no_grad():
            s.mean("evaluation", s.loss(s.batch()))
        s.model.train()
    s.train()


@habit(THEME, "evaluation in between: `torch.inference_mode()`")
def evaluate_inference(s: Script) -> None:
    s.by_hand()
    for _ in range(2):
        s.train()
        s.model.eval()
        with torch.inference_mode():
            s.mean("evaluation", s.loss(s.batch()))
        s.model.train()
    s.train()


@habit(THEME, "evaluation without `no_grad`: `model.eval()` alone, no backward pass")
def evaluate_with_graph(s: Script) -> None:
    s.by_hand()
    s.train()
    s.model.eval()
    s.mean("evaluation", s.loss(s.batch()).item())
    s.model.train()
    s.train(2)


@habit(THEME, "`model.generate(...)` in between", model="gpt2")
def generate(s: Script) -> None:
    s.by_hand()
    s.train()
    s.model.eval()
    start = torch.tensor([[1, 2]])
    s.see("words", s.model.generate(start, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist())
    s.model.train()
    s.train()


@habit(
    THEME,
    "`torch.amp.GradScaler` by hand: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`",
    instead='`Booster(mixed_precision="fp16")`',
)
def grad_scaler(s: Script) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch())
        s.mean("loss", loss)
        scaler.scale(loss).backward()
        scaler.step(s.optimizer)
        scaler.update()


@habit(THEME, "`torch.autocast` by hand around the forward pass", tolerance=BF16)
def autocast(s: Script) -> None:
    s.by_hand()
    for _ in range(2):
        s.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = s.loss(s.batch())
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "activation checkpoints by hand: `torch.utils.checkpoint` around blocks")
def checkpointed(s: Script) -> None:
    model = s.unwrap()
    for layer in model.layers:
        layer.forward = _Checkpointed(layer.forward)
    s.train(3)


class _Checkpointed:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Any:
        return checkpoint(self.forward, x, use_reentrant=False)


@habit(THEME, "`model.gradient_checkpointing_enable()` after `boost`", model="gpt2")
def hf_checkpointing(s: Script) -> None:
    s.model.gradient_checkpointing_enable()
    s.train(3)


@habit(THEME, "an exception in a forward pass that is caught; training goes on", breaks=True)
def exception_in_forward(s: Script) -> None:
    s.train()
    layer = s.unwrap().layers[-1]
    handle = layer.register_forward_hook(_raise)
    s.optimizer.zero_grad()
    try:
        s.passes()
    except Exception as error:
        s.see("raised", "skip this batch" in str(error))
    handle.remove()
    s.train(2)


@habit(THEME, "an exception in a backward pass that is caught; training goes on", breaks=True)
def exception_in_backward(s: Script) -> None:
    s.by_hand()
    s.train()
    s.optimizer.zero_grad()
    handle = s.unwrap().layers[0].register_full_backward_hook(_raise)
    loss = s.loss(s.batch())
    try:
        s.backward(loss)
    except RuntimeError as error:
        s.see("raised", "skip this batch" in str(error))
    handle.remove()
    s.train(2)


def _raise(*_: Any) -> None:
    raise RuntimeError("skip this batch")


def _train_collecting(s: Script, way: str, loss: Callable[[Any, list[Tensor]], Any]) -> None:
    s.by_hand()
    for _ in range(3):
        s.optimizer.zero_grad()
        x, y = s.batch()
        notes: list[Tensor] = []
        result = s.model(x, *([notes] if s.habit.model == "collecting" else []), y, way)
        found = loss(result, notes)
        s.mean("loss", found)
        s.backward(found)
        s.step()


@habit(THEME, "modules append auxiliary losses to a list that the script has given", model="collecting")
def auxiliary_losses(s: Script) -> None:
    _train_collecting(s, "output", lambda output, notes: output + 0.1 * torch.stack(notes).sum())


@habit(
    THEME,
    "the model appends its loss to a list that the script has given, and returns None",
    model="collecting",
)
def loss_in_a_list(s: Script) -> None:
    _train_collecting(s, "list", lambda output, notes: notes[-1] + 0.1 * notes[0])


@habit(THEME, "the model keeps its loss as an attribute, and returns None", model="collecting")
def loss_as_attribute(s: Script) -> None:
    _train_collecting(s, "attribute", lambda output, notes: s.unwrap().loss)


@habit(THEME, "the model returns its loss in an object of the script's own class", model="collecting")
def loss_in_an_object(s: Script) -> None:
    _train_collecting(s, "object", lambda output, notes: output.loss)


@habit(
    THEME,
    "a model without blocks keeps its loss as an attribute, and returns None",
    model="flat",
    instead="return the loss",
)
def flat_loss_as_attribute(s: Script) -> None:
    _train_collecting(s, "attribute", lambda output, notes: s.unwrap().loss)


@habit(
    THEME,
    "a model without blocks returns its loss in an object of the script's own class",
    model="flat",
    instead="return a tensor, or a dataclass",
)
def flat_loss_in_an_object(s: Script) -> None:
    _train_collecting(s, "object", lambda output, notes: output.loss)


@habit(
    THEME,
    "dropout, with `torch.manual_seed` (masks differ from the serial ones; ranks stay alike)",
    model="dropping",
    compare=False,
)
def dropout(s: Script) -> None:
    s.train(3)


def _train_by(s: Script, call: Any) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        x, y = s.batch()
        loss = F.cross_entropy(call(x), y)
        s.mean("loss", loss)
        s.backward(loss)
        s.step()
