"""``GeminiDDP`` beside training: reading weights, evaluation, failures, initialization, models of others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh import initialize
from colossalai.nn.parallel import GeminiDDP as FromOldPlace
from colossalai.zero import get_static_torch_model
from colossalai.zero.gemini import GeminiAdamOptimizer, GeminiDDP, OutOfCapacity, TensorState
from tests.zero.gemini.runs import SMALL, Block, Case, Net, Serial, Training, batch, compare, loss_of, net

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


def small(
    model: nn.Module, policy: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> GeminiDDP:
    size = SMALL * dtype.itemsize
    options = {"min_chunk_size_mb": size, "search_range_mb": size, **options}
    return GeminiDDP(model, "cpu", policy, dtype=dtype, **options)


def test_weights_are_those_of_the_model_and_rest_where_they_should() -> None:
    expected = net().state_dict()
    for policy in ("cpu", "cuda"):
        model = small(net(), policy)
        tiers = model.chunk_manager
        assert {c.home.name for c in tiers.chunks if c.home} == {"compute" if policy == "cuda" else "host"}
        assert tiers.compute.used == (sum(c.nbytes for c in tiers.chunks) if policy == "cuda" else 0)
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], t) for n, t in expected.items())
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()  # tied
    assert FromOldPlace is GeminiDDP


def test_parameters_refuse_to_be_read_while_they_are_away() -> None:
    model = small(net())
    weight = model.unwrap().blocks[0].inner.weight
    with pytest.raises(RuntimeError, match=r"isnan needs the values of 'blocks.0.inner.weight', which lie"):
        weight.isnan()
    assert weight.shape == (16, 8)
    with model.whole_parameters():
        assert torch.equal(weight, net().blocks[0].inner.weight)
    states = {slot.state for chunk in model.chunk_manager.chunks for slot in chunk.slots}
    assert states <= {TensorState.FREE, TensorState.HOLD}


def test_a_layer_that_was_put_into_the_model_later_is_saved_with_its_own_values() -> None:
    model = small(net())
    model.unwrap().blocks[0].inner = nn.Linear(8, 16)
    found, own = model.state_dict()["blocks.0.inner.weight"], model.unwrap().blocks[0].inner.weight
    assert torch.equal(found, own.detach())
    (shard,) = list(model.state_dict_shard())
    assert torch.equal(shard["blocks.0.inner.weight"], own.detach())


def test_a_static_copy() -> None:
    model = small(net(), dtype=torch.bfloat16)
    copied = get_static_torch_model(model)
    assert type(copied) is Net
    words = batch(0)
    expected = net().to(torch.bfloat16).float()(words)
    assert torch.equal(copied(words), expected)
    assert model.chunk_manager.compute.used == 0


def test_evaluation_sees_the_last_update_and_leaves_nothing_behind() -> None:
    run, serial = Training(Case(early=True)), Serial(Case())
    for step in range(3):
        run.step(batch(step))
        serial.step(batch(step))
        run.model.eval()
        with torch.no_grad():
            got, expected = loss_of(run.model, batch(9)), loss_of(serial.model, batch(9))
        assert torch.allclose(got, expected, rtol=1e-5)
        assert run.model.chunk_manager.compute.used == 0
        run.model.train()


def test_the_module_that_needs_too_much_is_named() -> None:
    model = small(net(), compute_capacity=1000)
    message = (
        r"needs [\d,]+ bytes of weights at the same time \(chunk .*\), but the compute tier has a capacity"
        " of 1,000 bytes"
    )
    with pytest.raises(OutOfCapacity, match="attention.*" + message):
        model(batch(0))
    assert not any(chunk.users for chunk in model.chunk_manager.chunks)


class Moody(nn.Module):
    """Fails when it is told to, and skips layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, skip: int = -1, fail: bool = False) -> Tensor:
        for i, block in enumerate(self.blocks):
            if fail and i == 3:
                raise ValueError("moody")
            if i != skip:
                x = block(x)
        return x


def test_training_goes_on_after_a_failure_and_in_another_order() -> None:
    torch.manual_seed(0)
    model = Moody()
    serial = copy.deepcopy(model)
    run = small(model, compute_capacity=6000)
    optimizer, reference = GeminiAdamOptimizer(run, **ADAM), torch.optim.AdamW(serial.parameters(), **ADAM)
    for step, skip in enumerate((-1, 2, 5, 0, -1)):
        x = torch.randn(4, 8)
        with pytest.raises(ValueError, match="moody"):
            run(x, fail=True)
        expected = serial(x, skip).square().mean()
        expected.backward()
        reference.step()
        reference.zero_grad()
        loss = run(x, skip).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(loss, expected, rtol=1e-4), step
    assert run.chunk_manager.compute.peak <= 6000


class Shared(nn.Module):
    """One layer in every segment of reentrant checkpointing: its gradient comes in parts."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(24, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for _ in range(3):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=bool(self.reentrant))
        return x @ self.embed.weight.t()


def shared(reentrant: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Shared(reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_that_come_in_parts(reentrant: bool) -> None:
    for early in (False, True):
        run = compare(Case(reentrant=reentrant, early=early), build=shared)
        assert bool(run.model.gradients.late) == reentrant


def test_a_model_on_meta_is_drawn_into_its_chunks() -> None:
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(
            nn.Embedding(24, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 24)
        )
    optimizer = torch.optim.AdamW(model.parameters())  # built before: it is pointed to what takes their place
    expected = nn.Sequential(nn.Embedding(24, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 24))
    initialize(expected, 7)
    run = small(model, compute_capacity=3000, seed=7)
    found = run.state_dict()
    assert all(torch.equal(found[n], t) for n, t in expected.state_dict().items())
    assert run.chunk_manager.compute.peak <= 3000
    from colossalai.zero.gemini import GeminiOptimizer

    wrapped = GeminiOptimizer(optimizer, run)
    wrapped.backward(run(batch(0)).square().mean())
    wrapped.step()


def test_a_model_that_is_half_on_meta_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ValueError, match=r"'1.weight' is on the meta device, '0.weight' is not; build all of the model"
    ):
        small(model)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Gemini trains in torch.float16, .*; got dtype=torch.float64"):
        small(net(), dtype=torch.float64)
    with pytest.raises(ValueError, match="prefetch is a number of chunks, at least 0; got -1"):
        small(net(), prefetch=-1)
    with pytest.raises(ValueError, match="host_buffers is a number of gradient buffers, at least 1; got 0"):
        small(net(), host_buffers=0)
    odd = nn.Linear(2, 2)
    odd.register_parameter("count", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    with pytest.raises(TypeError, match=r"chunks hold floating-point parameters; 'count' is of torch.int64"):
        small(odd)
    with pytest.raises(RuntimeError, match=r"cannot load the weights of Net: .*missing: embed.weight"):
        small(net()).load_state_dict({})


def test_loading_changes_what_is_trained() -> None:
    run, serial = Training(Case(dtype=torch.bfloat16)), Serial(Case(dtype=torch.bfloat16))
    run.step(batch(0))
    torch.manual_seed(5)
    other = Net().to(torch.bfloat16).state_dict()
    run.model.load_state_dict(other)
    serial.step(batch(0))
    serial.model.load_state_dict(other)
    for step in range(2):
        assert torch.allclose(run.step(batch(step)), serial.step(batch(step)), rtol=1e-3)
    found = run.model.state_dict()
    for name, tensor in serial.model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_hugging_face_gradient_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=3, n_head=2, n_positions=8, vocab_size=24, resid_pdrop=0.0
    )
    config.attn_pdrop = config.embd_pdrop = 0.0
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    serial = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    run = small(model, compute_capacity=20_000, prefetch=1)
    optimizer, reference = GeminiAdamOptimizer(run, **ADAM), torch.optim.AdamW(serial.parameters(), **ADAM)
    for step in range(3):
        words = batch(step)
        expected = serial(input_ids=words, labels=words).loss
        expected.backward()
        reference.step()
        reference.zero_grad()
        loss = run(input_ids=words, labels=words).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(loss, expected, rtol=1e-4)


def test_chunks_can_be_printed_while_their_weights_are_away() -> None:
    model = small(net())
    for chunk in model.chunk_manager.chunks:
        for slot in chunk.slots:
            assert slot.name in repr(slot)
