"""Blocks of any model that are computed again in the backward pass, and a loss that is computed in slabs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.launchers import launch_from_torch
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.nn.loss.head_loss import head_loss
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import assert_close, assert_equal, spawn
from colossalai.utils import checkpoint_blocks

transformers = pytest.importorskip("transformers")

IDS = torch.arange(12).view(2, 6) * 5 % 31


def gpt2(dropout: float = 0.1) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16,
        n_head=2,
        n_layer=3,
        vocab_size=31,
        n_positions=16,
        attn_pdrop=0.0,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=31,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=31, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def train(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients and the bytes that the forward pass kept beside the parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(3)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return (
        loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        sum(kept.values()),
    )


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize("build", [gpt2, llama, t5])
def test_same_gradients_and_less_kept(build: Callable[[], nn.Module], mode: Any) -> None:
    torch.manual_seed(0)
    plain = build().train()
    loss, gradients, kept = train(plain)
    plain.zero_grad()
    again = checkpoint_blocks(plain, mode)
    assert again is plain
    checked_loss, checked, checked_kept = train(plain)
    assert_equal(checked_loss, loss)
    assert checked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_equal(checked[name], gradient)
    # hooks inside of a checkpoint do not see what it keeps by itself: products, in the selective mode
    assert checked_kept < kept


class CountProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_products_are_not_computed_again() -> None:
    """Only where mode is selective are the products of the forward pass the only ones of each block."""
    counts = {}
    for mode in (None, "selective", "full"):
        torch.manual_seed(0)
        model = gpt2().train()
        if mode is not None:
            checkpoint_blocks(model, mode)
        with CountProducts() as found:
            model(input_ids=IDS, labels=IDS).loss.backward()
        counts[mode] = found.count
    assert counts["selective"] == counts[None] < counts["full"]


def test_evaluation_generation_and_copies() -> None:
    torch.manual_seed(0)
    model = gpt2().eval()
    expected = model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    checkpoint_blocks(model)
    assert_equal(model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0), expected)
    assert type(model.transformer.h[0]).__name__ == "GPT2Block"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss, gradients, _ = train(twin.train())
        assert torch.isfinite(loss)
        assert gradients
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="key-value cache with entries in training"):
        model.train()(IDS, past_key_values=cache)


def test_compiled() -> None:
    """The compiler keeps what the mode says: the fewer, the more is computed again."""
    kept = {}
    for mode in (None, "selective", "full"):
        torch.manual_seed(0)
        model = chunk_causal_loss(gpt2(dropout=0.0)).train()
        _, gradients, _ = train(model)
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        if mode is not None:
            checkpoint_blocks(model, mode)
        model.zero_grad()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        _, found, kept[mode] = train(compiled)
        for name, gradient in gradients.items():
            assert_close(found[f"_orig_mod.{name}"], gradient)
    assert kept[None] > kept["selective"] > kept["full"]


def test_refusals() -> None:
    model = gpt2()
    with pytest.raises(ValueError, match="mode is one of keep, selective, full, offload, got 'some'"):
        checkpoint_blocks(model, "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has no module 'transformer.x'"):
        checkpoint_blocks(model, blocks=["transformer.x"])
    with pytest.raises(ValueError, match=r"found no nn.ModuleList of layers in Linear"):
        checkpoint_blocks(nn.Linear(2, 2))
    model.transformer.gradient_checkpointing = True
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        checkpoint_blocks(model)
    with pytest.raises(ValueError, match="causal language models of transformers"):
        chunk_causal_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_loss(
    build: Callable[[], nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colossalai.mesh import row_loss

    monkeypatch.setattr(row_loss, "_SLAB", 70)  # slabs of two rows, and a last one
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    labels = IDS.clone()
    labels[0, 2:4] = -100
    expected = model(input_ids=IDS, labels=labels)
    expected.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    for count in (None, 7):
        whole = {} if count is None else {"num_items_in_batch": count}
        wanted = model(input_ids=IDS, labels=labels, **whole).loss
        chunk_causal_loss(model)
        assert_close(model(input_ids=IDS, labels=labels, **whole).loss.to(wanted.dtype), wanted)
        del model._loss_function
    chunk_causal_loss(model).zero_grad()
    model(input_ids=IDS, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="the label 36 is neither one of the 31 classes"):
        model(input_ids=IDS, labels=labels + 31)


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_without_scores(
    build: Callable[[], nn.Module], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colossalai.nn.loss import head_loss

    monkeypatch.setattr(head_loss, "_SCORES", 31 * 5)  # slabs of four rows
    monkeypatch.setattr(head_loss, "_COMPILED_SCORES", 31 * 5)
    torch.manual_seed(0)
    model = build().eval()
    labels = IDS.clone()
    labels[0, 2:4] = -100
    (model(input_ids=IDS, labels=labels).loss * 3).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    wanted = [model(input_ids=IDS, labels=labels, num_items_in_batch=n).loss for n in (None, 7)]
    scores = model(input_ids=IDS).logits
    chunk_causal_loss(model, whole_scores=False).zero_grad()

    def loss_of(ids: Tensor, **options: Any) -> Tensor:
        return model(input_ids=ids, labels=labels, use_cache=False, **options).loss

    run = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiled else loss_of
    (run(IDS) * 3).backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-7)
    assert_close(torch.stack([loss_of(IDS, num_items_in_batch=n) for n in (None, 7)]), torch.stack(wanted))
    assert model(input_ids=IDS, labels=labels).logits is None
    assert model(input_ids=IDS, labels=labels, return_dict=False)[1] is None
    assert_close(model(input_ids=IDS).logits, scores)
    with torch.no_grad():
        assert_close(model(input_ids=IDS, labels=labels).logits, scores)
    with pytest.raises(ValueError, match="the label 36 is neither one of the 31 classes"):
        model(input_ids=IDS, labels=labels + 31)


def test_a_loss_without_scores_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 31}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    scaled = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, **heads))
    with pytest.raises(ValueError, match="are not simply what a linear head makes"):
        chunk_causal_loss(scaled, whole_scores=False)
    assert not hasattr(scaled.lm_head, "targets")
    hooked = llama()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the head has forward hooks"):
        chunk_causal_loss(hooked, whole_scores=False)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_attention_without_a_mask(build: Callable[[], nn.Module]) -> None:
    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func) and "backward" not in str(func):
                masks.append((kwargs or {}).get("attn_mask") is not None)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = build().eval()
    padded = {"attention_mask": (torch.arange(6) < torch.tensor([[4], [6]])).long()}
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}
    kinds: list[dict[str, Any]] = [{}, padded, packed]
    expected = [model(input_ids=IDS, use_cache=False, **kind).logits for kind in kinds]
    skip_causal_mask(model)
    for kind, wanted in zip(kinds, expected, strict=True):
        masks: list[bool] = []
        # aot_eager: transformers makes a mask for positions that it cannot read
        run = torch.compile(
            lambda ids, kind=kind: model(input_ids=ids, use_cache=False, **kind).logits, backend="aot_eager"
        )
        with torch.no_grad(), Masks():
            assert_close(run(IDS), wanted)
        assert masks == [bool(kind)] * len(masks) != [], kind
    assert_equal(
        skip_causal_mask(model).generate(IDS, max_new_tokens=3, do_sample=False),
        build_again(model).generate(IDS, max_new_tokens=3, do_sample=False),
    )


def build_again(model: nn.Module) -> Any:
    plain = (gpt2 if "GPT2" in type(model).__name__ else llama)().eval()
    plain.load_state_dict(model.state_dict())
    return plain


def test_masks_that_are_needed_are_not_skipped() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 31}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, sliding_window=3))
    with pytest.raises(ValueError, match="MistralForCausalLM does not make a causal mask alone"):
        skip_causal_mask(window)
    eager = llama()
    eager.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attends by 'eager', not by 'sdpa'"):
        skip_causal_mask(eager)
    # its code wants a mask by allow_is_causal_skip
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, num_attention_heads=2))
    with pytest.raises(ValueError, match="FalconForCausalLM does not make a causal mask alone"):
        skip_causal_mask(falcon)


def test_padding_of_an_encoder_is_not_skipped() -> None:
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=1, vocab_size=31, n_positions=16, add_cross_attention=True
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    nn.init.normal_(model.transformer.h[0].crossattention.c_proj.weight)
    kind = {
        "encoder_hidden_states": torch.randn(2, 4, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    }
    expected = model(input_ids=IDS, **kind).logits
    skip_causal_mask(model)
    assert model.config._attn_implementation == "sdpa"  # another process may load the model, or its config
    assert_equal(model(input_ids=IDS, **kind).logits, expected)


def test_gradients_of_a_head_do_not_overflow_in_fp16() -> None:
    hidden = torch.full((40_000, 4), 5.0, dtype=torch.float16)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    (head_loss(hidden, weight, None, torch.zeros(len(hidden), dtype=torch.long)) / len(hidden)).backward()
    assert weight.grad is not None
    assert_close(weight.grad[0], torch.full_like(weight.grad[0], 5 * (1 / 8 - 1)))


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
}


def _losses(model: nn.Module, booster: Booster, optimizer: Any, ids: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return losses


def _plugins(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({}, backend="gloo")
    for plugin in PLUGINS.values():
        found = []
        for changed in (False, True):
            torch.manual_seed(0)
            model = gpt2(dropout=0.0).train()
            if changed:
                skip_causal_mask(chunk_causal_loss(checkpoint_blocks(model), whole_scores=False))
            booster = Booster(plugin=plugin())
            boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
            found.append(_losses(boosted, booster, optimizer, IDS.roll(rank, 1)))
        for a, b in zip(*found, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_under_every_plugin() -> None:
    spawn(_plugins, 2)
