"""Existing models under every mode equal the serial model: loss, gradients, weights after Adam."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, full_shape, placement
from colossalai.testing import assert_equal_in_group, fake_world, parametrize_sample, spawn
from colossalai.testing.parity import FP32, ParityError, PlacedRun, Problem, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402

SIX = ["gpt2", "bert", "opt", "llama", "t5", "vit"]
STYLES = ["mistral", "qwen2", "qwen3"]
CARRIED = ["gpt_neox", "gemma2", "starcoder2", "phi3"]
MODES: dict[str, dict[str, Any]] = {
    "1d": {"size": 4, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}


def _launch(tensor: dict[str, Any]) -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, backend="gloo", verbose=False)


def _plan(problem: Problem) -> PlacedRun:
    model = colossalai.nn.parallelize(problem.build())
    return PlacedRun(problem, model, gpc.mesh, problem.loss)


def check_parity(
    rank: int, world_size: int, port: int, tensor: dict[str, Any], names: list[str], steps: int
) -> None:
    _launch(tensor)
    for name in names:
        try:
            check_plan(zoo.problem(name, steps), _plan)
        except ParityError as error:
            raise ParityError(f"{name}, {tensor}: {error}") from error


def test_1d_on_two_ranks() -> None:
    spawn(check_parity, 2, tensor={"size": 2, "mode": "1d"}, names=[*SIX, *STYLES], steps=3)


def test_the_plan_that_a_config_carries() -> None:
    """For these there is no policy of ours."""
    spawn(check_parity, 2, tensor={"size": 2, "mode": "1d"}, names=CARRIED, steps=2)


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_four_ranks(mode: str) -> None:
    """In 2D the batch and the features are cut as well."""
    spawn(check_parity, 4, tensor=MODES[mode], names=[*SIX, "qwen2"], steps=3)


CUBES = [(mode, name) for mode in ("2.5d", "3d") for name in [*SIX, *STYLES]]


@parametrize_sample("mode, name", CUBES, n=4)
def test_eight_ranks(mode: str, name: str) -> None:
    spawn(check_parity, 8, tensor=MODES[mode], names=[name], steps=2)


def test_a_wrong_policy_is_noticed() -> None:
    """The check can fail: a fused weight that is cut as one."""
    with pytest.raises(Exception, match=r"gpt2, .* differs from the serial model"):
        spawn(check_broken, 2)


def check_broken(rank: int, world_size: int, port: int) -> None:
    from colossalai.nn.policies import Cut, Policy
    from colossalai.nn.policies.tables import GPT2

    _launch({"size": 2, "mode": "1d"})
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
    """Names and classes stay; what is cut holds a part, tied parameters stay one, and the model can be on meta."""
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
    _launch(tensor)
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


def _check_generate() -> None:
    serial = zoo.build("gpt2").eval()
    model = colossalai.nn.parallelize(copy.deepcopy(serial))
    ids = zoo.batch("gpt2")["input_ids"]
    for sample in (False, True):
        tokens = []
        for each in (serial, model):
            torch.manual_seed(3)
            tokens.append(each.generate(ids, max_new_tokens=4, do_sample=sample))
        assert torch.equal(*tokens)


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_outputs_and_generate(mode: str) -> None:
    spawn(check_outputs, 4, tensor=MODES[mode])


# ---- dropout ----


def check_dropout(rank: int, world_size: int, port: int) -> None:
    _launch({"size": 2, "mode": "1d"})
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
    loss = model(**given).loss
    assert_equal_in_group(loss.detach())  # masks of the stream are alike, or the ranks would drift apart
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
    _launch(MODES["2d"])
    model = colossalai.nn.parallelize(zoo.build("opt", dropout=0.5))
    seen: list[torch.Tensor] = []
    model.model.decoder.layers[0].fc2.register_forward_hook(lambda *_: seen.append(torch.get_rng_state()))
    loss = model(**zoo.batch("opt")).loss
    assert_equal_in_group(loss.detach())
    states = [torch.empty_like(seen[0]) for _ in range(4)]
    dist.all_gather(states, seen[0])
    assert len({bytes(state.numpy()) for state in states}) == 4
    assert_equal_in_group(torch.get_rng_state())


def test_every_rank_draws_its_own_where_the_stream_is_cut() -> None:
    spawn(check_cut_dropout, 4)


# ---- refusals ----


def _cut(
    model: nn.Module, mode: str | None = "1d", sizes: dict[str, int] | None = None, **options: Any
) -> Any:
    sizes = {"tp": 4} if sizes is None else sizes
    with fake_world(rank=0, world_size=torch.Size(sizes.values()).numel()):
        return colossalai.nn.parallelize(model, mode, mesh=Mesh(sizes), **options)


SQUARE = {"row": 2, "col": 2}


def _meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return zoo.BUILD[name](**options)


def test_heads_that_do_not_divide() -> None:
    wanted = r"num_attention_heads=6 is cut by tp=4 into 4 parts.* nearest valid numbers are 4 and 8, or .* 1, 2, 3, 6"
    with pytest.raises(ValueError, match=wanted):
        _cut(_meta("gpt2", n_head=6, n_embd=24))
    with pytest.raises(ValueError, match=r"num_key_value_heads=2 is cut by tp=4 .* numbers are 4, or"):
        _cut(_meta("llama", num_key_value_heads=2))


def test_sizes_that_do_not_divide_leave_the_model_whole() -> None:
    model = _meta("bert", intermediate_size=30)
    before = {n: p.shape for n, p in model.named_parameters()}
    wanted = r"BertForMaskedLM, module 'bert.encoder.layer.0.intermediate.dense': Linear: out_features=30 .* 28 and 32"
    with pytest.raises(ValueError, match=wanted):
        _cut(model)
    assert before == {n: p.shape for n, p in model.named_parameters()}
    assert type(model) is transformers.BertForMaskedLM


def test_unknown_architectures() -> None:
    with pytest.raises(
        ValueError, match=r"no policy for Linear \(model_type None\).*pass policy=.*gpt2, bert, opt"
    ):
        _cut(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"plan that its config carries, which knows mode '1d' only"):
        _cut(_meta("gpt_neox"), "2d", SQUARE)
    model = _meta("gpt_neox")
    model.config.base_model_tp_plan = {"layers.*.mlp": "moe_tp_experts"}
    with pytest.raises(ValueError, match=r"style 'moe_tp_experts' at 'layers.\*.mlp'.*it knows colwise"):
        _cut(model)


def test_modules_without_a_rule() -> None:
    config = zoo.build("vit").config
    with torch.device("meta"):
        model = transformers.ViTForMaskedImageModeling(config)
    with pytest.raises(
        ValueError, match=r"mode '2d' cuts every activation .* no rule for decoder.0; use mode '1d'"
    ):
        _cut(model, "2d", SQUARE)
    _cut(model)
    with pytest.raises(ValueError, match=r"layerdrop=0.1 drops whole layers by numbers that differ .* '2d'"):
        _cut(_meta("opt", layerdrop=0.1), "2d", SQUARE)
    with pytest.raises(
        ValueError, match=r"no linear layer of GPT2LMHeadModel is named by the policy for opt"
    ):
        _cut(_meta("gpt2"), policy=colossalai.nn.policies.POLICIES[2])


def test_modules_that_share_what_is_cut() -> None:
    from colossalai.nn.policies.tables import GPT2

    rules = {path: rule for path, rule in GPT2.rules.items() if path != "lm_head"}
    policy = colossalai.nn.policies.Policy(("gpt2",), rules)
    with pytest.raises(
        ValueError, match=r"lm_head.weight is shared with a module that the policy cuts, but has no rule"
    ):
        _cut(_meta("gpt2"), policy=policy)
    tables = {**GPT2.rules, "embed_tokens": GPT2.rules["wte"]}
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens': a Gemma2TextScaledWordEmbedding may do more than look"
    ):
        _cut(
            _meta("gemma2"),
            policy=colossalai.nn.policies.Policy(
                ("gemma2",), {**tables, "mlp.up_proj": rules["h.*.mlp.c_fc"]}
            ),
        )


def test_modes_and_meshes() -> None:
    model = _meta("gpt2")
    assert type(colossalai.nn.parallelize(model)) is type(_meta("gpt2"))  # not launched: nothing is cut
    assert colossalai.nn.parallelize(model, None) is model
    with pytest.raises(ValueError, match=r"mode='2d'\): the job's tensor mode is None; launch with"):
        colossalai.nn.parallelize(model, "2d")
    with pytest.raises(ValueError, match=r"mode='2d'\) needs a mesh with axis 'row'; it has tp"):
        _cut(model, "2d")
    with pytest.raises(ValueError, match="unknown tensor-parallel mode '4d'"):
        _cut(model, "4d")
    _cut(model)
    with pytest.raises(ValueError, match="GPT2LMHeadModel is parallel already"):
        _cut(model)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    _launch({"size": 2, "mode": "1d", "sequence_parallel": True})
    with pytest.raises(ValueError, match="launch without sequence_parallel"):
        colossalai.nn.parallelize(zoo.build("gpt2"))
    gpc.destroy()
    _launch({"size": 2, "mode": "1d"})
    with pytest.raises(ValueError, match=r"mode='3d'\): the job's tensor mode is '1d'"):
        colossalai.nn.parallelize(zoo.build("gpt2"), "3d")


def test_refusals_of_a_launched_job() -> None:
    spawn(check_refusals, 2)


def check_batch(rank: int, world_size: int, port: int) -> None:
    _launch(MODES["2d"])
    model = colossalai.nn.parallelize(zoo.build("gpt2"))
    with pytest.raises(ValueError, match=r"a batch of 3 rows is shared by row=2 = 2 ranks; .* 2 and 4"):
        model(input_ids=torch.ones(3, 4, dtype=torch.long))


def test_a_batch_that_does_not_divide() -> None:
    spawn(check_batch, 4)


# ---- a policy of one's own ----


class Block(nn.Module):
    """A model that is not of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x).relu()))


def check_own_policy(rank: int, world_size: int, port: int) -> None:
    from colossalai.nn.policies import Cut, Policy

    _launch({"size": 2, "mode": "1d"})
    policy = Policy(("block",), {"up": Cut("expand"), "down": Cut("contract")})

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Block()

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


def test_a_policy_of_ones_own() -> None:
    spawn(check_own_policy, 2)
