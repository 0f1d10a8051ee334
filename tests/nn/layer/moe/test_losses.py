"""Losses of routers: whose they are, when they end, and what hides them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossalai.context.moe_context import MOE_CONTEXT
from colossalai.global_variables import moe_env
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, Top2Router
from colossalai.nn.loss import MoeCrossEntropyLoss, MoeLoss
from colossalai.utils import checkpoint
from colossalai.utils.activation_checkpoint import computed_once

WIDTH = 8


class Two(nn.Module):
    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [MoeLayer(WIDTH, 4, Top2Router(), FFNExperts(4, WIDTH, 16)) for _ in range(2)]
        self.first, self.second = layers
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            if self.recompute == "ours":
                x = checkpoint(layer, False, x, use_reentrant=False)
            elif self.recompute:
                x = torch_checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")  # type: ignore[assignment]
            else:
                x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _no_losses_of_other_tests() -> None:
    MOE_CONTEXT.reset_loss()


def _input() -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def _mse(weight: float = 1.0) -> MoeLoss:
    return MoeLoss(weight, nn.MSELoss)


def test_the_loss_of_both_layers_is_added_once() -> None:
    model, x = Two(), _input()
    y = model(x)
    each = [made.losses.balance.item() for made in MOE_CONTEXT._passes[True].made]
    assert len(each) == 2
    main = nn.functional.mse_loss(y, torch.zeros_like(y))
    loss = _mse(0.5)(y, torch.zeros_like(y))
    assert loss.item() == pytest.approx(main.item() + 0.5 * sum(each))
    assert float(_mse(0.5)(y, torch.zeros_like(y))) == pytest.approx(float(loss))  # asked twice, the same
    assert float(moe_env.aux_loss) == pytest.approx(sum(each))


@pytest.mark.parametrize("recompute", ["ours", "torch"])
def test_a_recomputation_adds_nothing(recompute: str) -> None:
    grads = []
    for how in ("", recompute):
        model, x = Two(how), _input()
        _mse()(model(x), torch.zeros_like(x)).backward()
        assert MOE_CONTEXT.take() is None
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


def test_a_checkpoint_that_hides_the_losses_is_refused() -> None:
    model, x = Two("reentrant"), _input()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _mse()(model(x), torch.zeros_like(x))


def test_passes_without_a_loss_leave_nothing_behind() -> None:
    model, x = Two(), _input()
    expected = float(_mse()(model(x), torch.zeros_like(x)))
    model(x).sum().backward()  # by another loss
    assert float(_mse()(model(x), torch.zeros_like(x))) == pytest.approx(expected)
    with torch.no_grad():
        model(x)
        model(x)
        assert float(_mse()(model(x), torch.zeros_like(x))) == pytest.approx(expected)
        model(x)
    assert float(_mse()(model(x), torch.zeros_like(x))) == pytest.approx(expected)


def test_two_passes_before_a_loss_both_count() -> None:
    model, x = Two(), _input()
    y = model(x)
    once = float(MOE_CONTEXT.get_loss())
    y = model(x)
    z = model(x)
    assert float(MOE_CONTEXT.get_loss()) == pytest.approx(2 * once)
    assert y.requires_grad
    assert z.requires_grad


def test_a_pass_whose_outputs_are_thrown_away_does_not_count() -> None:
    """Such as a first one, to see a shape."""
    model, x = Two(), _input()
    model(x)
    once = float(MOE_CONTEXT.get_loss())
    MOE_CONTEXT.reset_loss()
    for _ in range(3):
        model(x)
    y = model(x)
    assert len(MOE_CONTEXT._passes[True].made) == 2
    assert float(MOE_CONTEXT.get_loss()) == pytest.approx(once)
    for _ in range(2):
        y = model(x)  # the first lives until the second is there
    assert float(MOE_CONTEXT.get_loss()) == pytest.approx(once)
    assert y.requires_grad


class Detached(Two):
    """Its second layer teaches the first nothing, but for the balance of its own loads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).detach())


def test_a_layer_whose_outputs_are_detached_counts() -> None:
    model, x = Detached(), _input()
    for passes in (1, 2):
        for _ in range(passes):
            y = model(x)  # all but the last are thrown away
        assert MOE_CONTEXT.losses() is not None
        assert len(MOE_CONTEXT._passes[True].made) == 2
        model.zero_grad()
        _mse()(y, torch.zeros_like(y)).backward()
        assert model.first.gate_weight.grad is not None
        assert model.first.gate_weight.grad.abs().sum() > 0
    Detached()(x)
    y, z = model(x), model(x)  # both count
    MOE_CONTEXT.losses()
    assert len(MOE_CONTEXT._passes[True].made) == 4  # and nothing of the other model
    assert y.requires_grad
    assert z.requires_grad


def test_an_evaluation_with_gradients_leaves_nothing_behind() -> None:
    model, x = Two(), _input()
    expected = float(_mse()(model(x), torch.zeros_like(x)).detach())
    model.eval()
    kept = model(x)
    assert kept.requires_grad
    model.train()
    assert float(_mse()(model(x), torch.zeros_like(x)).detach()) == pytest.approx(expected)


def test_a_layer_without_gradients_leaves_no_list_behind() -> None:
    model, x = Two(), _input()
    with torch.no_grad():
        for _ in range(3):
            model.first(x)
        assert len(MOE_CONTEXT._passes[False].made) == 1


def test_a_teacher_takes_nothing_from_its_pupil() -> None:
    pupil, teacher, x = Two(), Two(), _input()
    y = pupil(x)
    alone = _mse()(y, torch.zeros_like(y))
    y = pupil(x)
    with torch.no_grad():
        teacher(x)
    loss = _mse()(y, torch.zeros_like(y))
    assert torch.equal(loss, alone)
    loss.backward()
    assert pupil.second.gate_weight.grad is not None
    assert teacher.second.gate_weight.grad is None


@pytest.mark.parametrize("hidden", ["first", "second"])
def test_a_checkpoint_that_hides_some_losses_is_refused(hidden: str) -> None:
    model, x = Two(), _input()
    for layer in (model.first, model.second):
        x = torch_checkpoint(layer, x, use_reentrant=True) if layer is getattr(model, hidden) else layer(x)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _mse()(x, torch.zeros_like(x))
    assert float(_mse(0.0)(x, torch.zeros_like(x)).detach()) > 0  # nothing is lost


def test_a_bias_that_a_recomputation_would_find_changed_is_refused() -> None:
    x = _input()
    layer = MoeLayer(WIDTH, 4, Top2Router(bias_rate=0.1), FFNExperts(4, WIDTH, 16))
    with pytest.raises(RuntimeError, match=r"bias_rate=0.1\) is in a checkpoint of torch"):
        torch_checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(layer, False, x, use_reentrant=False).sum().backward()


def test_biases_stay_in_float32() -> None:
    layer = MoeLayer(WIDTH, 4, Top2Router(bias_rate=0.001), FFNExperts(4, WIDTH, 16)).bfloat16()
    assert layer.gate_weight.dtype is torch.bfloat16
    assert layer.expert_bias is not None
    layer.expert_bias.fill_(0.7001)
    layer.half().bfloat16()
    assert torch.equal(layer.expert_bias, torch.full((4,), 0.7001))
    assert layer.double().expert_bias.dtype is torch.float64


def test_documented_losses() -> None:
    model, x = Two(), _input()
    labels = torch.zeros(12, dtype=torch.int64)
    scores = model(x).flatten(0, 1)
    plain = nn.functional.cross_entropy(scores, labels, label_smoothing=0.1)
    loss = MoeLoss(aux_weight=0.01, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)(scores, labels)
    assert float(loss) == pytest.approx(float(plain) + 0.01 * float(MOE_CONTEXT.get_loss()))
    assert float(MoeCrossEntropyLoss(0.0)(scores, labels)) == pytest.approx(
        float(nn.functional.cross_entropy(scores, labels))
    )
    with pytest.raises(ValueError, match="aux_weight must be a number of at least 0, got -1"):
        MoeLoss(-1, nn.CrossEntropyLoss)


def test_a_recomputation_does_not_choose_anew() -> None:
    layer, x = MoeLayer(WIDTH, 4, Top2Router(), FFNExperts(4, WIDTH, 16)), _input()
    seen: list[Tensor] = []
    layer.router.register_forward_hook(lambda module, args, routing: seen.append(routing.chosen))
    y = checkpoint(layer, False, x, use_reentrant=False)
    with torch.no_grad():  # as if the scores were rounded in another way
        layer.gate_weight.data.neg_()
    y.sum().backward()
    first, again = seen
    assert torch.equal(first, again)
    assert not torch.equal(first, layer.router(layer._scores(x.detach().flatten(0, 1))).chosen)


def test_nested_checkpoints_keep_the_first_decision() -> None:
    drawn: list[float] = []

    def inner(x: Tensor) -> Tensor:
        drawn.append(computed_once(lambda: torch.rand(()).item()))
        return (x * drawn[-1]).square()

    def outer(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(inner, False, x, use_reentrant=False)
        return (made * computed_once(lambda: 2.0)).square()

    x = torch.ones(3, requires_grad=True)
    checkpoint(outer, False, x, use_reentrant=False).sum().backward()
    assert len(drawn) >= 3  # the first run, that of the outer checkpoint, that of the inner one
    assert len(set(drawn)) == 1
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.full((3,), 16 * drawn[0] ** 4))  # of 4 d^4 x^4
