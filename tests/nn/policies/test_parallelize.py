"""Existing models under every mode equal the serial model: loss, gradients, weights after Adam."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, full_shape, placement
from colossalai.testing import assert_equal_in_group, fake_world, parametrize_sample, spawn
from colossalai.testing.parity import FP32, ParityError, PlacedRun, Problem, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402
from tests.nn.policies.zoo import MODES, launch  # noqa: E402

SIX = ["gpt2", "bert", "opt", "llama", "t5", "vit"]
STYLES = ["mistral", "qwen2", "qwen3"]
CARRIED = ["gpt_neox", "gemma2", "starcoder2", "phi3"]


def _plan(problem: Problem) -> PlacedRun:
    model = colossalai.nn.parallelize(problem.build())
    return PlacedRun(problem, model, gpc.mesh, problem.loss)


def check_parity(
    rank: int, world_size: int, port: int, tensor: dict[str, Any], names: list[str], steps: int
) -> None:
    launch(tensor)
    for name in names:
        try:
            check_plan(zoo.problem(name, steps), _plan)
        except ParityError as error:
            raise ParityError(f"{name}, {tensor}: {error}") from error


def test_1d_on_two_ranks() -> None:
    spawn(check_parity, 2, tensor={"size": 2, "mode": "1d"}, names=[*SIX, *STYLES], steps=2)


def test_the_plan_that_a_config_carries() -> None:
    """For these there is no policy of ours."""
    spawn(check_parity, 2, tensor={"size": 2, "mode": "1d"}, names=CARRIED, steps=2)


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_four_ranks(mode: str) -> None:
    """In 2D the batch and the features are cut as well."""
    spawn(check_parity, 4, tensor=MODES[mode], names=[*SIX, *STYLES], steps=2)


CUBES = [(mode, name) for mode in ("2.5d", "3d") for name in [*SIX, *STYLES]]


@parametrize_sample("mode, name", CUBES, n=4)
def test_eight_ranks(mode: str, name: str) -> None:
    spawn(check_parity, 8, tensor=MODES[mode], names=[name], steps=2)


def check_our_loss(rank: int, world_size: int, port: int, tensor: dict[str, Any]) -> None:
    """A loss of ours knows that the model gives every rank the scores of all rows."""
    launch(tensor)
    given = zoo.batch("gpt2")
    ids = given["input_ids"]
    losses = [nn.functional.cross_entropy, colossalai.nn.CrossEntropyLoss()]
    gradients = []
    for loss in losses:
        model = colossalai.nn.parallelize(zoo.build("gpt2"))
        loss(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_a_loss_of_ours_over_whole_scores(mode: str) -> None:
    spawn(check_our_loss, 4, tensor=MODES[mode])


def check_cut_scores(rank: int, world_size: int, port: int, tensor: dict[str, Any]) -> None:
    """The loss from pieces of the scores; without labels they are whole, and generating works."""
    launch(tensor)
    for name in ("gpt2", "llama"):
        problem = zoo.problem(name, 2)
        model = colossalai.nn.parallelize(problem.build(), whole_scores=False)
        run = PlacedRun(problem, model, gpc.mesh, problem.loss)
        check_plan(problem, lambda _, run=run: run)
        given = zoo.batch(name)
        out, serial = model(**given), zoo.build(name)
        assert out.logits.numel() <= zoo.BATCH * zoo.LENGTH * (zoo.VOCABULARY // 2 + 1) // (world_size // 2)
        model, serial = colossalai.nn.parallelize(zoo.build(name), whole_scores=False).eval(), serial.eval()
        expected, got = (m(**given, num_items_in_batch=7).loss for m in (serial, model))
        torch.testing.assert_close(got, expected)
        # it leaves the loss from pieces in place
        model = colossalai.nn.chunk_causal_loss(model)
        torch.testing.assert_close(model(**given, num_items_in_batch=7).loss, expected)
        ids = given.pop("input_ids")
        torch.testing.assert_close(model(ids).logits, serial(ids).logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(ids, max_new_tokens=3), serial.generate(ids, max_new_tokens=3))


@pytest.mark.parametrize("tensor", [{"size": 2, "mode": "1d"}, MODES["2d"]], ids=["1d", "2d"])
def test_scores_that_stay_cut(tensor: dict[str, Any]) -> None:
    spawn(check_cut_scores, tensor["size"], tensor=tensor)


def test_a_wrong_policy_is_noticed() -> None:
    """The check can fail: a fused weight that is cut as one."""
    with pytest.raises(Exception, match=r"gpt2, .* differs from the serial model"):
        spawn(check_broken, 2)


def check_broken(rank: int, world_size: int, port: int) -> None:
    from colossalai.nn.policies import Cut, Policy
    from colossalai.nn.policies.cutting.hugging_face import GPT2

    launch({"size": 2, "mode": "1d"})
    policy = Policy(("gpt2",), {**GPT2.rules, "h.*.attn.c_attn": Cut("expand")})
    problem = zoo.problem("gpt2", 1)
    wrong = PlacedRun(
        problem, colossalai.nn.parallelize(problem.build(), policy=policy), gpc.mesh, problem.loss
    )
    try:
        check_plan(problem, lambda _: wrong)
    except ParityError as error:
        raise ParityError(f"gpt2, {error}") from error


# ---- what the model looks like afterwards ----


@pytest.mark.parametrize("name", [*SIX, *STYLES])
def test_names_classes_and_sizes(name: str) -> None:
    """Names and classes stay; what is cut holds a part, tied parameters stay one, and the model can be on
    meta.
    """
    with fake_world(rank=1, world_size=4), torch.device("meta"):
        serial, model = zoo.BUILD[name](), zoo.BUILD[name]()
        assert colossalai.nn.parallelize(model, "1d", mesh=Mesh({"tp": 4})) is model
    assert isinstance(model, type(serial))
    assert type(model).__name__ == type(serial).__name__
    before, after = dict(serial.named_parameters()), dict(model.named_parameters())
    assert list(before) == list(after)
    assert {n: p.shape for n, p in before.items()} == {n: full_shape(p) for n, p in after.items()}
    cut = [n for n, p in after.items() if placement(p).sharded]
    weights = [n for n, p in before.items() if p.ndim == 2 and p.numel() >= 16 * 16]
    assert set(weights) - set(cut) <= {"transformer.wpe.weight", *_small(weights)}
    assert list(serial.state_dict()) == list(model.state_dict())


def _small(names: list[str]) -> list[str]:
    """Tables of positions, and square layers that 1D leaves whole."""
    return [n for n in names if "position" in n or "transform" in n or "pooler" in n]


# ---- outputs ----


def check_outputs(rank: int, world_size: int, port: int, tensor: dict[str, Any]) -> None:
    launch(tensor)
    for name in ("gpt2", "t5"):
        serial = zoo.build(name, attn_implementation="eager").eval()
        model = colossalai.nn.parallelize(copy.deepcopy(serial))
        given = {**zoo.batch(name), "output_hidden_states": True, "output_attentions": True}
        expected, got = serial(**given), model(**given)
        assert list(expected) == list(got)
        for field in expected:
            if field != "past_key_values":
                torch.testing.assert_close(got[field], expected[field], rtol=1e-4, atol=1e-5)
        parts = model(**given, return_dict=False)
        assert isinstance(parts, tuple)
        torch.testing.assert_close(parts[0], expected.loss)
        assert torch.equal(copy.deepcopy(model)(**given).logits, got.logits)
    _check_classes()
    _check_images()
    _check_generate()


def _check_classes() -> None:
    """Heads with few classes, one on the pooled token and one on all."""
    config = zoo.build("bert").config
    ids = {k: v for k, v in zoo.batch("bert").items() if k != "labels"}
    for kind in (transformers.BertForSequenceClassification, transformers.BertForTokenClassification):
        torch.manual_seed(1)
        serial = kind(config).eval()
        model = colossalai.nn.parallelize(copy.deepcopy(serial))
        labels = torch.zeros(serial(**ids).logits.shape[:-1], dtype=torch.long)
        expected, got = serial(**ids, labels=labels), model(**ids, labels=labels)
        torch.testing.assert_close(got.logits, expected.logits)
        torch.testing.assert_close(got.loss, expected.loss)
    base = transformers.BertModel(config).eval()
    expected = base(**ids)
    got = colossalai.nn.parallelize(copy.deepcopy(base))(ids["input_ids"], ids["attention_mask"])
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(got.pooler_output, expected.pooler_output)
    embeds = base.get_input_embeddings()(ids["input_ids"]).detach().requires_grad_()
    model = colossalai.nn.parallelize(copy.deepcopy(base))
    model(
        inputs_embeds=embeds, attention_mask=ids["attention_mask"]
    ).last_hidden_state.square().sum().backward()
    grad, embeds.grad = embeds.grad, None
    base(
        inputs_embeds=embeds, attention_mask=ids["attention_mask"]
    ).last_hidden_state.square().sum().backward()
    torch.testing.assert_close(grad, embeds.grad, rtol=1e-3, atol=1e-4)


def _check_images() -> None:
    """The gradient of the images, of which each rank sees some rows and makes some features."""
    serial = zoo.build("vit")
    given = zoo.batch("vit")
    images = given["pixel_values"].requires_grad_()
    grads = []
    for model in (serial, colossalai.nn.parallelize(copy.deepcopy(serial))):
        model(**given).loss.backward()
        grads.append(images.grad)
        images.grad = None
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-6)


def _check_generate() -> None:
    """Greedily, drawn, and by beams: three for each sample, and two that lie on different ranks in 2D."""
    ways: list[tuple[int, dict[str, Any]]] = [(4, {}), (4, {"do_sample": True}), (4, {"num_beams": 3})]
    for name, more in (("gpt2", [(1, {"num_beams": 2})]), ("llama", []), ("t5", [])):
        serial = zoo.build(name).eval()
        model = colossalai.nn.parallelize(copy.deepcopy(serial))
        for rows, options in [*ways, *more]:
            tokens = []
            for each in (serial, model):
                torch.manual_seed(3)
                ids = zoo.batch(name)["input_ids"][:rows]
                tokens.append(each.generate(ids, max_new_tokens=4, **options))
            assert torch.equal(*tokens), f"{name}, {options}"


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_outputs_and_generate(mode: str) -> None:
    spawn(check_outputs, 4, tensor=MODES[mode])


# ---- dropout ----


def check_dropout(rank: int, world_size: int, port: int) -> None:
    launch({"size": 2, "mode": "1d"})
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.5}
    model = zoo.build("gpt2", **drops)
    attention = model.transformer.h[0].attn
    with torch.no_grad():  # all heads alike: without dropout every rank would compute the same
        for param, width in ((attention.c_attn.weight, 4), (attention.c_attn.bias, 4)):
            heads = param.unflatten(-1, (12, width))
            heads.copy_(heads[..., :1, :].expand_as(heads))
    model = colossalai.nn.parallelize(model)
    seen: list[torch.Tensor] = []
    model.transformer.h[0].attn.c_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    given = zoo.batch("gpt2")
    for states in model(**given, output_hidden_states=True).hidden_states:
        assert_equal_in_group(
            states.detach()
        )  # masks of the stream are alike, or the ranks would drift apart
    assert_equal_in_group(torch.get_rng_state())
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0])
    assert not torch.allclose(*both)  # masks of heads are not
    _same_with_checkpointing(model, given)
    model.eval()
    assert torch.equal(model(**given).logits, model(**given).logits)


def _same_with_checkpointing(model: Any, given: dict[str, torch.Tensor]) -> None:
    """The second forward of activation checkpointing draws the same masks again."""
    results = []
    for enable in (False, True):
        model.zero_grad()
        if enable:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        model(**given).loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(plain, again)


def test_dropout_alike_on_the_stream_and_independent_on_heads() -> None:
    spawn(check_dropout, 2)


def check_cut_dropout(rank: int, world_size: int, port: int) -> None:
    launch(MODES["2d"])
    model = colossalai.nn.parallelize(zoo.build("opt", dropout=0.5))
    seen: list[torch.Tensor] = []
    model.model.decoder.layers[0].fc2.register_forward_hook(lambda *_: seen.append(torch.get_rng_state()))
    loss = model(**zoo.batch("opt")).loss
    assert_equal_in_group(loss.detach())
    states = [torch.empty_like(seen[0]) for _ in range(4)]
    dist.all_gather(states, seen[0])
    assert len({bytes(state.numpy()) for state in states}) == 4
    assert_equal_in_group(torch.get_rng_state())
    _same_with_checkpointing(model, zoo.batch("opt"))


def test_every_rank_draws_its_own_where_the_stream_is_cut() -> None:
    spawn(check_cut_dropout, 4)


# ---- a policy of one's own ----


class Block(nn.Module):
    """A model that is not of Hugging Face, maybe with layers that share their weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.up2, self.down2 = nn.Linear(8, 16), nn.Linear(16, 8)
        if tied:
            self.up2.weight, self.down2.weight, self.down2.bias = (
                self.up.weight,
                self.down.weight,
                self.down.bias,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        return self.head(self.down2(self.up2(x).relu()))


def check_own_policy(rank: int, world_size: int, port: int, tied: bool) -> None:
    from colossalai.nn.policies import Cut, Policy

    launch({"size": 2, "mode": "1d"})
    up, down = Cut("expand"), Cut("contract")
    policy = Policy(("block",), {"up": up, "up2": up, "down": down, "down2": down})

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Block(tied)

    problem = Problem(
        build=build,
        batches=[torch.randn(4, 8, generator=torch.Generator().manual_seed(s)) for s in range(2)],
        loss=lambda model, x: model(x).square().mean(),
    )
    check_plan(problem, lambda p: _own(p, policy), tolerance=FP32)


def _own(problem: Problem, policy: Any) -> PlacedRun:
    model = colossalai.nn.parallelize(problem.build(), policy=policy)
    assert model.up.weight.shape == (8, 8)
    return PlacedRun(problem, model, gpc.mesh, problem.loss)


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_of_ones_own(tied: bool) -> None:
    spawn(check_own_policy, 2, tied=tied)


def check_two_ways(rank: int, world_size: int, port: int) -> None:
    from colossalai.nn.policies import Cut, Policy

    launch({"size": 2, "mode": "1d"})
    model = nn.ModuleDict({"up": nn.Linear(8, 8, bias=False), "down": nn.Linear(8, 8, bias=False)})
    model["down"].weight = model["up"].weight
    policy = Policy(("square",), {"up": Cut("expand"), "down": Cut("contract")})
    with pytest.raises(ValueError, match=r"up.weight and down.weight are one parameter, .* cut in two ways"):
        colossalai.nn.parallelize(model, policy=policy)


def test_one_weight_is_not_cut_in_two_ways() -> None:
    spawn(check_two_ways, 2)


# ---- on a GPU ----


def check_gpu(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch({"size": 2, "mode": "1d"})
    for name in ("gpt2", "t5", "vit"):
        serial = zoo.build(name).cuda()
        problem = Problem(
            build=lambda serial=serial: copy.deepcopy(serial),
            batches=[{k: v.cuda() for k, v in zoo.batch(name, step).items()} for step in range(2)],
            loss=lambda model, given: model(**given).loss,
        )
        check_plan(problem, _plan)
    if rank == 0:
        serial.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        model = zoo.BUILD[name]().eval()
    load_pretrained(colossalai.nn.parallelize(model), folder)
    given = problem.batches[0]
    torch.testing.assert_close(model(**given).logits, serial.eval()(**given).logits, rtol=1e-3, atol=1e-4)
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.5}
    model = colossalai.nn.parallelize(zoo.build("gpt2", **drops).cuda())
    given = {k: v.cuda() for k, v in zoo.batch("gpt2").items()}
    for states in model(**given, output_hidden_states=True).hidden_states:
        assert_equal_in_group(states.detach())
    _same_with_checkpointing(model, given)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Two ranks share it, over gloo."""
    spawn(check_gpu, 2, folder=tmp_path)


def _boosted_first(**place: Any) -> None:
    colossalai.launch_from_torch(
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, backend="gloo", verbose=False
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"was boosted already.*call parallelize before the optimizer"):
        colossalai.nn.parallelize(model)


def test_a_model_that_was_boosted_is_refused() -> None:
    spawn(_boosted_first, 2)
