"""Habits with gradients: clipping, reading, writing, clearing."""

from __future__ import annotations

import torch
from torch import nn

from tests.habits.habit import habit
from tests.habits.script import Script

THEME = "Gradients"


@habit(
    THEME,
    "the usual loop: `booster.backward(loss, optimizer)`, `optimizer.step()`, `optimizer.zero_grad()`",
)
def documented_loop(s: Script) -> None:
    s.train(3)


@habit(THEME, "`loss.backward()` in the place of `booster.backward(loss, optimizer)`")
def plain_backward(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch())
        s.mean("loss", loss)
        loss.backward()
        s.step()


@habit(
    THEME,
    "`torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)`",
    instead="`optimizer.clip_grad_by_norm(0.1)`",
)
def torch_clip_norm(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        s.see("norm", float(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)))
        s.step()


@habit(
    THEME,
    "`torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)`",
    instead="`optimizer.clip_grad_by_value(0.01)`",
)
def torch_clip_value(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        nn.utils.clip_grad_value_(s.model.parameters(), 0.01)
        s.step()


@habit(THEME, "`optimizer.clip_grad_by_norm(0.1)`, and its result in the log")
def own_clip_norm(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        if s.serial:
            norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
        else:
            norm = s.optimizer.clip_grad_by_norm(0.1)
        s.see("norm", float(norm))
        s.step()


@habit(THEME, "`optimizer.clip_grad_by_value(0.01)`")
def own_clip_value(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        if s.serial:
            nn.utils.clip_grad_value_(s.model.parameters(), 0.01)
        else:
            s.optimizer.clip_grad_by_value(0.01)
        s.step()


@habit(THEME, "reading `p.grad` after the backward pass, for a log of norms")
def read_grad(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes()
        s.each("grad", lambda grad: float(grad.norm()))
        s.step()


@habit(THEME, "`p.grad.mul_(0.5)` before the step (noise, scaling by hand)")
def write_grad(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        for p in s.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        s.step()


@habit(THEME, "`p.grad = None` in the place of `optimizer.zero_grad()`")
def clear_by_none(s: Script) -> None:
    for _ in range(3):
        s.passes()
        s.step()
        for p in s.parameters():
            p.grad = None


@habit(THEME, "`model.zero_grad()`")
def clear_by_model(s: Script) -> None:
    for _ in range(3):
        s.model.zero_grad()
        s.passes()
        s.step()


@habit(THEME, "`optimizer.zero_grad(set_to_none=False)`")
def clear_to_zero(s: Script) -> None:
    for _ in range(3):
        s.optimizer.zero_grad(set_to_none=False)
        s.passes()
        s.step()


@habit(THEME, "no `zero_grad` at all: gradients of all steps add up")
def never_clear(s: Script) -> None:
    for _ in range(3):
        s.passes()
        s.step()


@habit(THEME, "`p.register_hook(lambda g: g * 0.5)` before `boost`", prepares=True)
def hook_before(s: Script) -> None:
    model = s.build()
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    s.prepare(model)
    s.train(3)


@habit(THEME, "`p.register_hook(lambda g: g * 0.5)` after `boost`")
def hook_after(s: Script) -> None:
    for p in s.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    s.train(3)


@habit(THEME, "`torch.autograd.grad(loss, list(model.parameters()))`, and a step by hand")
def grad_of_parameters(s: Script) -> None:
    s.by_hand()
    x, y = s.batch()
    loss = s.loss((x, y))
    s.mean("loss", loss)
    grads = torch.autograd.grad(loss, s.parameters())
    for p, grad in zip(s.parameters(), grads, strict=True):
        p.grad = grad
    s.step()


@habit(THEME, "`torch.autograd.grad(loss, x)`: gradients of the inputs (saliency)")
def grad_of_inputs(s: Script) -> None:
    s.train()
    x, y = s.batch()
    x.requires_grad_()
    loss = s.loss((x, y))
    (grad,) = torch.autograd.grad(loss, x)
    s.mean("saliency", grad.abs().sum())
    s.train()


@habit(THEME, "`create_graph=True`: a gradient penalty in the loss")
def gradient_penalty(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        x, y = s.batch()
        x.requires_grad_()
        out = s.loss((x, y))
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        # a sum over the batch of each sample's gradient of a mean: joined, it would be smaller
        loss = out + (grad * len(x)).square().sum(1).mean()
        s.mean("loss", loss)
        s.backward(loss)
        s.step()
