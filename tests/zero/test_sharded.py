"""The sharded optimizer over the simplest of plans: gradients are averaged
whole, pieces are cut from them, weights are gathered.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.amp.naive_amp import FP16Optimizer
from colossalai.amp.naive_amp.grad_scaler import ConstantGradScaler, DynamicGradScaler
from colossalai.mesh import own_grad
from colossalai.nn.optimizer import FusedLAMB, HybridAdam
from colossalai.testing import spawn
from colossalai.zero.pieces import even_layout, is_elementwise, make_piece, owned_layout
from colossalai.zero.sharded import ShardedOptimizer, needs_masters
from colossalai.zero.states import SlicedTensor


class Plain(ShardedOptimizer):
    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer, **options: Any) -> None:
        params = [p for group in optim.param_groups for p in group["params"] if p.requires_grad]
        self.flats: list[Tensor] = []
        pieces = []
        ranks, me = dist.get_world_size(), dist.get_rank()
        for number, p in enumerate(params):
            layout = (
                even_layout([p.numel()], ranks)
                if is_elementwise(optim)
                else owned_layout([p.numel()], ranks, number % ranks)
            )
            flat = torch.zeros(layout.total, dtype=p.dtype)
            flat[: p.numel()] = p.detach().view(-1)
            p.data = flat[: p.numel()].view(p.shape)
            dtype = torch.float32 if needs_masters(optim, p.dtype) else None
            pieces.append(make_piece(p, layout, 0, me, flat, dtype=dtype, group=dist.group.WORLD))
            self.flats.append(flat)
        super().__init__(optim, pieces, group=dist.group.WORLD, **options)

    def bring_gradients(self) -> None:
        for piece in self.pieces:
            if (own := own_grad(piece.param)) is not None:
                dist.all_reduce(own.div_(dist.get_world_size()))
                grad = piece.cut(own)
                piece.value.grad = None if piece.is_empty else grad.to(piece.value.dtype).clone()

    def publish(self) -> None:
        for piece, flat in zip(self.pieces, self.flats, strict=True):
            if piece.is_whole:
                dist.broadcast(flat, group_src=piece.layout.owner)
            else:
                own = flat[slice(*piece.layout.bounds(dist.get_rank()))].clone()
                dist.all_gather(list(flat.chunk(dist.get_world_size())), own)


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].bias.requires_grad_(False)
    return model.to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    bias = [p for p in model.parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": rest}, {"params": bias, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def hybrid(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=1e-2)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return FusedLAMB(model.parameters(), lr=1e-2, max_grad_norm=0.1)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


BATCH = torch.linspace(-1, 1, 60).view(12, 5)


def backward(model: nn.Module, optimizer: Any, step: int, rank: int = 0, ranks: int = 1) -> None:
    x = (BATCH * (step + 1)).chunk(ranks)[rank].to(next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()


def serial(make: Callable[[nn.Module], Any], steps: int) -> tuple[nn.Module, Any]:
    model = build()
    optimizer = make(model)
    for step in range(steps):
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def check_equal(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    for make in (adamw, hybrid, lamb, adafactor):
        model = build()
        optimizer = Plain(model, make(model))
        expected, reference = serial(make, 3)
        for step in range(3):
            backward(model, optimizer, step, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        state = optimizer.state_dict()
        check_states(state, reference.state_dict())
        fresh = build()
        for other in (make(fresh), Plain(fresh, make(fresh))):
            other.load_state_dict(state)
            check_states(other.state_dict(), reference.state_dict())


def check_states(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [g["params"] for g in got["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert got["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert got["state"][number].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(torch.as_tensor(got["state"][number][name]), torch.as_tensor(value))


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_and_states_are_those_of_the_serial_optimizer(ranks: int) -> None:
    spawn(check_equal, ranks)


def check_masters(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    model, alone = build(torch.bfloat16), build(torch.bfloat16)
    optimizer = Plain(model, adamw(model))
    reference = FP16Optimizer(adamw(alone), ConstantGradScaler(1))
    for step in range(4):
        backward(model, optimizer, step)  # the same on every rank
        backward(alone, reference, step)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    saved = optimizer.state_dict()
    for number, value in reference.state_dict()["master_weights"].items():
        assert torch.equal(saved["master_weights"][number], value)
    reference.load_state_dict(saved)
    optimizer.load_state_dict(reference.state_dict())
    # weights that somebody else writes win over masters
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.refresh_masters()
    piece = next(p for p in optimizer.pieces if p.param is model[0].weight)
    assert piece.value.dtype == torch.float32
    assert not piece.value.any()
    untouched = next(p for p in optimizer.pieces if p.param is model[2].weight)
    assert untouched.is_empty or not torch.equal(untouched.value, untouched.weight.float())


def test_masters_are_those_of_a_serial_run_in_bf16() -> None:
    spawn(check_masters, 2)


def check_scale(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Plain(model, hybrid(model), scaler=DynamicGradScaler(2.0**10, hysteresis=1), max_norm=0.5)
    backward(model, optimizer, 0, rank, world_size)
    if rank == 1:  # one rank's gradient overflows
        own_grad(model[0].bias)[0] = float("inf")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.loss_scale == 2.0**9
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    expected = build()
    plain = hybrid(expected)
    for step in range(2):
        backward(model, optimizer, step, rank, world_size)
        backward(expected, plain, step)
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        plain.step()
        optimizer.step()
        assert not optimizer.step_was_skipped
        torch.testing.assert_close(optimizer.grad_norm, norm)
        plain.zero_grad()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_one_rank_that_overflows_skips_the_step_everywhere() -> None:
    spawn(check_scale, 2)


def check_parts(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    for make in (adamw, hybrid):
        model, expected = build(), build()
        parted, together = Plain(model, make(model)), Plain(expected, make(expected), max_norm=0.1)
        for step in range(2):
            for m, o in ((model, parted), (expected, together)):
                backward(m, o, step, rank, world_size)
            together.step()
            parted.clip_grad_by_norm(0.1)
            parted.refresh_masters()
            for piece in reversed(parted.pieces):
                parted.update([piece])
            parted.publish()
            parted.zero_grad()
            together.zero_grad()
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b)


def test_pieces_may_be_updated_one_after_the_other() -> None:
    spawn(check_parts, 2)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    model = build()
    optimizer = Plain(model, adamw(model))
    with pytest.raises(RuntimeError, match="takes no further group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="max_norm of at least 0"):
        Plain(build(), adamw(build()), max_norm=-1.0)
    backward(model, optimizer, 0)
    with pytest.raises(ValueError, match="takes no closure and no options"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    sliced = optimizer.sharded_state_dict()["state"][0]["exp_avg"]
    assert isinstance(sliced, SlicedTensor)
    with pytest.raises(RuntimeError, match="lies in slices on several ranks"):
        sliced + 1
    other = nn.Linear(4, 4)
    other_state = torch.optim.SGD(other.parameters(), lr=1).state_dict()
    with pytest.raises(ValueError, match="groups hold"):
        optimizer.load_state_dict(other_state)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="exp_avg of parameter 0 has shape"):
        optimizer.load_state_dict(state)


def test_refusals() -> None:
    spawn(check_refusals, 2)
