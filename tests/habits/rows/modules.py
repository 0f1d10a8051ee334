"""Habits that change the model after ``boost``: freezing, replacing, casting, hooks and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.habit import habit
from tests.habits.script import Script

THEME = "The model after `boost`"


@habit(THEME, "a part frozen before `boost`", model="frozen")
def frozen_before(s: Script) -> None:
    s.train(3)


@habit(THEME, "`requires_grad_(False)` after `boost`: a part is frozen")
def freeze_after(s: Script) -> None:
    s.train()
    for name, p in s.named():
        if name.startswith("first"):
            p.requires_grad_(False)
    s.train(2)


@habit(THEME, "`requires_grad_(True)` after `boost`: a part is unfrozen", model="frozen")
def unfreeze_after(s: Script) -> None:
    s.train()
    for name, p in s.named():
        if name.startswith("first"):
            p.requires_grad_(True)
    s.train(2)


@habit(
    THEME,
    "`model.head = nn.Linear(...)` after `boost`: a module is replaced",
    instead="replace it before `boost`",
)
def replace_module(s: Script) -> None:
    s.by_hand()
    s.train()
    torch.manual_seed(5)
    s.model.head = nn.Linear(8, 3)
    s.train(2)


@habit(
    THEME,
    "`model.unwrap().head = nn.Linear(...)`, and its parameters given to the optimizer",
    instead="replace it before `boost`",
)
def replace_and_add(s: Script) -> None:
    s.by_hand()
    s.train()
    torch.manual_seed(5)
    model = s.unwrap()
    model.head = nn.Linear(8, 3)
    s.optimizer.add_param_group({"params": list(model.head.parameters())})
    s.train(2)


@habit(
    THEME,
    "`model.layers[1].up.weight = model.layers[0].up.weight` after `boost`: weights are tied",
    instead="tie them before `boost`",
)
def tie_after(s: Script) -> None:
    s.by_hand()
    s.train()
    layers = s.unwrap().layers
    layers[1].up.weight = layers[0].up.weight
    s.train(2)


@habit(THEME, "`model.scale = 2.0`: an attribute that the forward pass reads", prepares=True)
def set_attribute(s: Script) -> None:
    s.by_hand()
    model = s.build()
    model.scale = 1.0
    model.head.register_forward_hook(lambda module, args, output: output * model.scale)
    s.prepare(model)
    s.train()
    s.model.scale = 2.0
    s.see("scale", model.scale)
    s.train(2)


@habit(THEME, "forward hooks on modules, which read activations")
def read_activations(s: Script) -> None:
    s.by_hand()
    norms: list[float] = []
    module = s.model.layers[0]
    module.register_forward_hook(lambda m, args, out: norms.append(float(out.detach().square().mean())))
    s.train(2)
    for norm in norms:
        s.mean("activation", norm)


@habit(THEME, "forward hooks that change activations")
def change_activations(s: Script) -> None:
    s.unwrap().layers[0].register_forward_hook(lambda m, args, out: out * 2.0)
    s.train(3)


@habit(THEME, "full backward hooks on modules")
def backward_hooks(s: Script) -> None:
    s.by_hand()
    seen: list[float] = []

    def hook(module: nn.Module, grad_in: Any, grad_out: tuple[Tensor, ...]) -> None:
        seen.append(len(grad_out))

    s.unwrap().layers[0].register_full_backward_hook(hook)
    s.train(3)
    s.see("calls", len(seen))


@habit(THEME, "`model.float()` and `model.to(device)` after `boost`, which change nothing")
def to_the_same(s: Script) -> None:
    s.train()
    s.model.float()
    s.model.to("cpu")
    s.train(2)


@habit(THEME, "`model.to(torch.bfloat16)` after `boost`", tolerance=5e-2)
def to_bf16(s: Script) -> None:
    s.by_hand()
    s.train()
    s.model.to(torch.bfloat16)
    for _ in range(2):
        s.optimizer.zero_grad()
        x, y = s.batch()
        loss = nn.functional.cross_entropy(s.model(x.bfloat16()).float(), y)
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "`model.half()` after `boost`", tolerance=5e-2)
def half(s: Script) -> None:
    s.by_hand()
    s.model.half()
    for _ in range(2):
        s.optimizer.zero_grad()
        x, y = s.batch()
        loss = nn.functional.cross_entropy(s.model(x.half()).float(), y)
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(THEME, "a buffer that the forward pass counts in", model="counting")
def counting_buffer(s: Script) -> None:
    s.by_hand()
    s.train(3)
    s.see("steps", int(s.model.steps))


@habit(THEME, "a buffer written by hand: `model.steps.fill_(7)`", model="counting")
def write_buffer(s: Script) -> None:
    s.by_hand()
    s.train()
    s.model.steps.fill_(7)
    s.train()
    s.see("steps", int(s.model.steps))


@habit(THEME, "batch norms in evaluation mode while the rest trains", model="normalized")
def frozen_batch_norm(s: Script) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    s.train(3)


@habit(THEME, "`torch.compile(model)` before `boost`", prepares=True)
def compile_before(s: Script) -> None:
    s.by_hand()
    s.prepare(torch.compile(s.build(), backend="eager"))
    s.train(2)


@habit(THEME, "`torch.compile(model)` after `boost`")
def compile_after(s: Script) -> None:
    s.by_hand()
    s.model = torch.compile(s.model, backend="eager")
    s.train(2)


@habit(THEME, "`booster.boost` of the same model twice", engine=False)
def boost_twice(s: Script) -> None:
    s.train()
    s.prepare(s.unwrap())
    s.train()


@habit(THEME, "two models and two optimizers in one step (GAN)")
def two_models(s: Script) -> None:
    s.by_hand()
    first, first_optimizer = s.model, s.optimizer
    s.prepare(s.build())
    for _ in range(2):
        x, y = s.batch()
        first_optimizer.zero_grad()
        s.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(s.model(x), y) + first(x).square().mean()
        s.mean("loss", loss)
        s.backward(loss)
        first_optimizer.step()
        s.step()
    s.mean("other", nn.functional.cross_entropy(first(x), y))


@habit(THEME, "a forward hook that scales outputs, registered before `boost`", prepares=True)
def module_hook_before(s: Script) -> None:
    model = s.build()
    model.layers[0].up.register_forward_hook(lambda module, args, output: output * 0.5)  # type: ignore[index,union-attr]
    s.prepare(model)
    s.train(3)
