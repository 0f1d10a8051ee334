"""Habits with weights: reading, using and writing them outside of the forward pass."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.habits.habit import habit
from tests.habits.script import Script

THEME = "Weights"


@habit(THEME, "`p.norm()` of the weights in a log")
def weight_norms(s: Script) -> None:
    s.train()
    s.each("weight", lambda p: float(p.detach().norm()))
    s.train()


@habit(THEME, "`p.detach().clone()`: a copy of the weights")
def copy_weights(s: Script) -> None:
    s.train()
    s.each("weight", lambda p: p.detach().clone())
    s.train()


@habit(THEME, "`model.head.weight.tolist()`, as printing does")
def print_weight(s: Script) -> None:
    s.by_hand()
    s.train()
    s.see("printed", s.model.head.weight.tolist())
    s.train()


@habit(THEME, "`sum(p.numel() for p in model.parameters())`")
def count_parameters(s: Script) -> None:
    s.each("weight", lambda p: p.numel())
    s.train()


@habit(THEME, "`p.requires_grad` and `p.shape` of every parameter", model="frozen")
def list_parameters(s: Script) -> None:
    s.each("weight", lambda p: (p.requires_grad, tuple(p.shape)) if p.shape else None)
    s.train()


@habit(THEME, "`module.weight.data.clamp_(-0.2, 0.2)` in the forward pass")
def clamp_in_forward(s: Script) -> None:
    s.unwrap().layers[0].register_forward_pre_hook(lambda m, args: _clamp_data(m.up.weight))
    s.train()
    s.train()


def _clamp_data(weight: torch.Tensor) -> None:
    weight.data.clamp_(-0.2, 0.2)


@habit(
    THEME,
    "a penalty of the weights in the loss: `loss + 0.01 * sum(p.square().sum() for p in model.parameters())`",
)
def weight_penalty(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch())
        s.mean("loss", loss)
        s.backward(loss + 0.01 * sum(p.square().sum() for p in s.parameters()))
        s.step()


@habit(
    THEME, "a weight used outside of the forward pass: `F.linear(h, model.first.weight.t())` (a tied decoder)"
)
def tied_decoder(s: Script) -> None:
    s.by_hand()
    for _ in range(3):
        s.optimizer.zero_grad()
        x, _ = s.batch()
        h = s.model(x, hidden=True)
        loss = (F.linear(h, s.model.first.weight.t()) - x).square().mean()
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "`with torch.no_grad(): p.clamp_(-0.2, 0.2)` after the step (weight clipping)")
def clamp(s: Script) -> None:
    for _ in range(3):
        s.train()
        with torch.no_grad():
            for p in s.parameters():
                p.clamp_(-0.2, 0.2)


@habit(THEME, "`p.data.clamp_(-0.2, 0.2)` after the step")
def clamp_data(s: Script) -> None:
    for _ in range(3):
        s.train()
        for p in s.parameters():
            p.data.clamp_(-0.2, 0.2)


@habit(THEME, "`p.data.copy_(value)`: weights written back")
def copy_into_data(s: Script) -> None:
    s.train()
    for p in s.parameters():
        p.data.copy_(torch.full(p.shape, 0.05))
    s.train(2)


@habit(THEME, "`p.data = value`")
def assign_data(s: Script) -> None:
    s.train()
    for p in s.parameters():
        p.data = torch.full(p.shape, 0.05)
    s.train(2)


@habit(THEME, "`with torch.no_grad(): p.zero_()`, `p.add_(1)` after `boost`")
def zero_weights(s: Script) -> None:
    with torch.no_grad():
        for p in s.parameters():
            p.zero_()
            p.add_(0.05)
    s.train(2)


@habit(THEME, "`nn.init.constant_(p, 0.05)` after `boost`")
def init_weights(s: Script) -> None:
    for p in s.parameters():
        nn.init.constant_(p, 0.05)
    s.train(2)


@habit(THEME, "`model.apply(init_weights)` after `boost`")
def apply_init(s: Script) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)

    s.by_hand()
    s.model.apply(init)
    s.train(2)


@habit(THEME, "`copy.deepcopy(model)` after `boost` (a teacher, an average)")
def deepcopy_model(s: Script) -> None:
    s.by_hand()
    s.train()
    teacher = copy.deepcopy(s.model)
    s.train()
    with torch.no_grad():
        s.mean("teacher", F.cross_entropy(*_first(s, teacher)))


@habit(THEME, "`copy.deepcopy(model.unwrap())`")
def deepcopy_unwrapped(s: Script) -> None:
    s.by_hand()
    s.train()
    teacher = copy.deepcopy(s.unwrap())
    s.train()
    with torch.no_grad():
        s.mean("teacher", F.cross_entropy(*_first(s, teacher)))


def _first(s: Script, teacher: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = s.batch()
    return teacher(x), y


@habit(THEME, "an average of the weights by hand: `e.lerp_(p, 0.5)` over `zip(ema, model.parameters())`")
def ema(s: Script) -> None:
    average = {name: p.detach().clone() for name, p in s.named()}
    for _ in range(2):
        s.train()
        with torch.no_grad():
            for name, p in s.named():
                average[name].lerp_(p.detach(), 0.5)
    s.state("average", average)


@habit(THEME, "`torch.optim.swa_utils.AveragedModel(model)`")
def averaged_model(s: Script) -> None:
    s.by_hand()
    averaged = AveragedModel(s.model)
    for _ in range(2):
        s.train()
        averaged.update_parameters(s.model)
    with torch.no_grad():
        s.mean("average", F.cross_entropy(*_first(s, averaged)))


@habit(THEME, "`parameters_to_vector(model.parameters())`, and back by `vector_to_parameters`")
def to_vector(s: Script) -> None:
    s.train()
    vector = nn.utils.parameters_to_vector(s.model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, s.model.parameters())
    s.train()
