"""Habits with optimizers and schedulers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.habits.habit import habit
from tests.habits.script import Script

THEME = "Optimizers and schedulers"


@habit(THEME, "parameter groups: no weight decay for vectors", prepares=True)
def param_groups(s: Script) -> None:
    model = s.build()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.05},
    ]
    s.prepare(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    s.train(3)


@habit(THEME, "an optimizer of some parameters only", prepares=True)
def part_of_parameters(s: Script) -> None:
    model = s.build()
    some = [p for name, p in model.named_parameters() if "layers" in name]
    s.prepare(model, s.make_optimizer(some))
    s.train(3)


@habit(
    THEME,
    "`optimizer.add_param_group(...)` after `boost`",
    prepares=True,
    instead="give it all groups before `boost`, with `lr=0` for those to come",
)
def add_group(s: Script) -> None:
    s.by_hand()
    model = s.build()
    first = list(model.first.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
    s.prepare(model, s.make_optimizer(rest))
    s.train()
    s.optimizer.add_param_group({"params": first})
    s.train(2)


@habit(THEME, '`for group in optimizer.param_groups: group["lr"] = 0.01`')
def set_lr(s: Script) -> None:
    s.train()
    for group in s.optimizer.param_groups:
        group["lr"] = 0.01
    s.train(2)


@habit(THEME, "a scheduler built before `boost`", prepares=True)
def scheduler_before(s: Script) -> None:
    model = s.build()
    s.prepare(model, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for _ in range(3):
        s.train()
        s.scheduler.step()
        s.see("lr", s.scheduler.get_last_lr())


@habit(THEME, "a scheduler built after `boost`")
def scheduler_after(s: Script) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(s.optimizer, 1, gamma=0.5)
    for _ in range(3):
        s.train()
        scheduler.step()
        s.see("lr", scheduler.get_last_lr())


@habit(
    THEME,
    "an optimizer built after `boost`: `SGD(model.parameters())`",
    prepares=True,
    instead="build it before, and give it to `boost`",
    engine=False,
)
def optimizer_after(s: Script) -> None:
    s.by_hand()
    model = s.build()
    if s.serial:
        s.prepare(model)
    else:
        s.model = s.booster.boost(model)[0]  # type: ignore[attr-defined]
        s.optimizer = s.make_optimizer(s.model.parameters())
    for _ in range(3):
        s.optimizer.zero_grad()
        loss = s.loss(s.batch())
        s.mean("loss", loss)
        loss.backward()
        s.optimizer.step()


@habit(
    THEME, "an optimizer built before the model is moved: `model.to(device)` before `boost`", prepares=True
)
def optimizer_before_to(s: Script) -> None:
    model = s.build()
    optimizer = s.make_optimizer(model.parameters())
    s.prepare(model.to("cpu"), optimizer)
    s.train(3)


@habit(THEME, "an optimizer of another copy of the model", prepares=True)
def optimizer_of_a_copy(s: Script) -> None:
    s.by_hand()
    model = s.build()
    other = copy.deepcopy(model)
    if s.serial:
        s.prepare(model)
    else:
        s.prepare(model, s.make_optimizer(other.parameters()))
    s.train(3)


@habit(
    THEME,
    "a second optimizer, not boosted, of a part of the model",
    instead="one optimizer with several groups",
)
def second_optimizer(s: Script) -> None:
    s.by_hand()
    second = torch.optim.SGD(s.model.head.parameters(), lr=0.05)
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes()
        s.step()
        second.step()


@habit(THEME, '`optimizer.state[p]["exp_avg"]`: reading the states', optimizer="adam")
def read_state(s: Script) -> None:
    s.train(2)
    s.state("first moments", {name: s.optimizer.state[p]["exp_avg"] for name, p in s.named()})
    s.train()


@habit(THEME, "`optimizer.state_dict()` on every rank, then `load_state_dict` of it")
def reload_state(s: Script) -> None:
    s.train()
    state = copy.deepcopy(s.optimizer.state_dict())
    s.train()
    s.optimizer.load_state_dict(state)
    s.train()


@habit(THEME, "`copy.deepcopy(optimizer)`")
def deepcopy_optimizer(s: Script) -> None:
    s.train()
    copy.deepcopy(s.optimizer)
    s.train(2)


@habit(THEME, "`optimizer.step(closure)`")
def closure(s: Script) -> None:
    for _ in range(2):

        def compute() -> Any:
            s.optimizer.zero_grad()
            loss = s.loss(s.batch())
            s.backward(loss)
            return loss

        s.mean("loss", s.optimizer.step(compute))


@habit(THEME, "`torch.optim.LBFGS`, with its closure", optimizer="lbfgs")
def lbfgs(s: Script) -> None:
    for _ in range(2):
        batch = s.batch()

        def compute(batch: Any = batch) -> Any:
            s.optimizer.zero_grad()
            loss = s.loss(batch)
            s.backward(loss)
            return loss

        s.optimizer.step(compute)


@habit(THEME, "`optimizer.step()` twice after one backward pass")
def step_twice(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes()
        s.step()
        s.step()


@habit(THEME, "`optimizer.step()` without a backward pass")
def step_without_backward(s: Script) -> None:
    s.step()
    s.train(2)
    s.optimizer.zero_grad()
    s.step()


@habit(THEME, '`optimizer.param_groups[0]["params"]`: norms of gradients through the optimizer')
def grads_of_groups(s: Script) -> None:
    s.optimizer.zero_grad()
    s.passes()
    names = [name for name, _ in s.named()]
    held = [p for group in s.optimizer.param_groups for p in group["params"]]
    s.state("gradients", {name: p.grad * 1.0 for name, p in zip(names, held, strict=True)})
    s.step()


@habit(
    THEME,
    "the step of the optimizer inside: `optimizer.optim.step()`, `optimizer.unwrap().step()`",
    instead="`optimizer.step()`",
)
def inner_step(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes()
        (s.optimizer if s.serial else s.optimizer.unwrap()).step()


@habit(THEME, "an update by hand: `p.data -= 0.1 * p.grad`")
def update_by_hand(s: Script) -> None:
    for _ in range(2):
        s.optimizer.zero_grad()
        s.passes()
        for p in s.parameters():
            p.data -= 0.1 * p.grad


@habit(
    THEME, "`torch.optim.SGD(...)` for `nn.Embedding(sparse=True)`", prepares=True, instead="`sparse=False`"
)
def sparse_embedding(s: Script) -> None:
    s.by_hand()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    words = torch.arange(16).reshape(8, 2) % 10
    for _ in range(2):
        s.optimizer.zero_grad()
        _, y = s.batch()
        loss = nn.functional.cross_entropy(s.model(words.chunk(s.replicas)[s.rank % s.replicas]), y)
        s.mean("loss", loss)
        s.backward(loss)
        s.step()


@habit(
    THEME,
    "`optimizer.state.clear()`, to begin anew with Adam's moments",
    optimizer="adam",
    instead="`optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})`",
)
def clear_states(s: Script) -> None:
    s.train(2)
    s.optimizer.state.clear()
    s.train(2)


@habit(THEME, "`optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})`", optimizer="adam")
def load_no_states(s: Script) -> None:
    s.train(2)
    s.optimizer.load_state_dict({**s.optimizer.state_dict(), "state": {}})
    s.train(2)


@habit(
    THEME,
    "an optimizer for each parameter that steps in a hook (`register_post_accumulate_grad_hook`)",
    instead="one optimizer, given to `boost`; Gemini's `update_in_backward` does this",
)
def step_in_hooks(s: Script) -> None:
    s.by_hand()
    own = {p: torch.optim.SGD([p], lr=0.1) for p in s.parameters()}

    def hook(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        s.passes()


@habit(
    THEME,
    "two optimizers of one model, of which `boost` gets the first",
    instead="one optimizer with two groups",
    prepares=True,
)
def second_optimizer_before(s: Script) -> None:
    model = s.build()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    second = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.05)
    s.prepare(model, torch.optim.SGD(matrices, lr=0.1))
    for _ in range(3):
        s.optimizer.zero_grad()
        second.zero_grad()
        s.passes()
        s.step()
        second.step()


@habit(
    THEME,
    "a list of the parameters from before `boost`, clipped by `torch.nn.utils.clip_grad_norm_`",
    instead="`model.parameters()`",
    prepares=True,
)
def clip_a_list_from_before(s: Script) -> None:
    model = s.build()
    params = list(model.parameters())
    s.prepare(model)
    for _ in range(3):
        s.optimizer.zero_grad()
        s.passes()
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        s.step()
