"""The formulas of the optimizers in float64, one tensor after the other, as the papers write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Weights = list[Tensor]
Update = Callable[[Weights, Weights, dict[str, Any], int], None]


def _moments(state: dict[str, Any], i: int, w: Tensor) -> list[Tensor]:
    return state.setdefault(i, [torch.zeros_like(w), torch.zeros_like(w)])


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adamw_mode: bool = True,
) -> Update:
    def update(weights: Weights, grads: Weights, state: dict[str, Any], step: int) -> None:
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            if not adamw_mode:
                g = g + weight_decay * w
            m, v = _moments(state, i, w)
            m.copy_(betas[0] * m + (1 - betas[0]) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g**2)
            m_hat = m / (1 - betas[0] ** step) if bias_correction else m
            v_hat = v / (1 - betas[1] ** step) if bias_correction else v
            if adamw_mode:
                w -= lr * weight_decay * w
            w -= lr * m_hat / (v_hat.sqrt() + eps)

    return update


def sgd(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
) -> Update:
    def update(weights: Weights, grads: Weights, state: dict[str, Any], step: int) -> None:
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            d = g if wd_after_momentum else g + weight_decay * w
            if momentum:
                b = d.clone() if step == 1 else momentum * state[i] + (1 - dampening) * d
                state[i] = b
                d = d + momentum * b if nesterov else b
            if wd_after_momentum:
                d = d + weight_decay * w
            w -= lr * d

    return update


def lamb(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adam: bool = False,
) -> Update:
    return fused_lamb(lr, False, betas, eps, weight_decay, max_grad_norm=0.0, use_nvlamb=True, ratio=not adam)


def fused_lamb(
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
    ratio: bool = True,
) -> Update:
    def update(weights: Weights, grads: Weights, state: dict[str, Any], step: int) -> None:
        if max_grad_norm:
            norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
            if norm > max_grad_norm:
                grads = [g * max_grad_norm / norm for g in grads]
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            if not adam_w_mode:
                g = g + weight_decay * w
            m, v = _moments(state, i, w)
            m.copy_(betas[0] * m + (1 - betas[0] if grad_averaging else 1.0) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g**2)
            m_hat = m / (1 - betas[0] ** step) if bias_correction else m
            v_hat = v / (1 - betas[1] ** step) if bias_correction else v
            u = m_hat / (v_hat.sqrt() + eps)
            if adam_w_mode:
                u = u + weight_decay * w
            trust = 1.0
            if ratio and (use_nvlamb or weight_decay) and w.norm() > 0 and u.norm() > 0:
                trust = float(w.norm() / u.norm())
            w -= lr * trust * u

    return update


def lars(
    lr: float = 1e-3,
    momentum: float = 0.0,
    eeta: float = 1e-3,
    weight_decay: float = 0.0,
    epsilon: float = 0.0,
) -> Update:
    def update(weights: Weights, grads: Weights, state: dict[str, Any], step: int) -> None:
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            trust = 1.0
            if w.norm() > 0 and g.norm() > 0:
                trust = float(eeta * w.norm() / (g.norm() + weight_decay * w.norm() + epsilon))
            b = momentum * state.get(i, torch.zeros_like(w)) + lr * trust * (g + weight_decay * w)
            state[i] = b
            w -= b

    return update
