"""What cannot be cut is refused before the model is changed, with the names and the sizes that would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh
from colossalai.testing import fake_world, spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402
from tests.nn.policies.zoo import MODES, launch  # noqa: E402


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
    wanted = (
        "num_attention_heads=6 is cut by tp=4 into 4 parts.* nearest valid numbers are 4 and 8, or"
        " .* 1, 2, 3, 6"
    )
    with pytest.raises(ValueError, match=wanted):
        _cut(_meta("gpt2", n_head=6, n_embd=24))
    with pytest.raises(ValueError, match=r"num_key_value_heads=3 is cut by tp=4 .* numbers are 4, or"):
        _cut(_meta("llama", num_attention_heads=12, hidden_size=24, num_key_value_heads=3))
    _cut(_meta("llama", num_key_value_heads=2))  # pairs of ranks share a head of keys
    _cut(_meta("phi3", num_key_value_heads=2))  # its plan leaves all heads on every rank


def test_sizes_that_do_not_divide_leave_the_model_whole() -> None:
    model = _meta("bert", intermediate_size=30)
    before = {n: p.shape for n, p in model.named_parameters()}
    wanted = (
        "BertForMaskedLM, module 'bert.encoder.layer.0.intermediate.dense': Linear:"
        " out_features=30 .* 28 and 32"
    )
    with pytest.raises(ValueError, match=wanted):
        _cut(model)
    assert before == {n: p.shape for n, p in model.named_parameters()}
    assert type(model) is transformers.BertForMaskedLM


def test_a_comparison_that_cannot_be_made_is_not_left_out_silently() -> None:
    model = _meta("gpt2")
    with pytest.raises(ValueError, match=r"cannot compare the cut model .* leave verify=True out"):
        _cut(model, verify=True)
    _cut(model)  # refused before anything was cut


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
        _cut(model, "2d", SQUARE)  # in 1D another plan is derived


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
    from colossalai.nn.policies.cutting.hugging_face import GPT2

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
    with pytest.raises(ValueError, match="unknown mode '4d'"):
        _cut(model, "4d")
    _cut(model)
    with pytest.raises(ValueError, match="GPT2LMHeadModel is parallel already"):
        _cut(model)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch({"size": 2, "mode": "1d", "sequence_parallel": True})
    with pytest.raises(ValueError, match="launch without sequence_parallel"):
        colossalai.nn.parallelize(zoo.build("gpt2"))
    gpc.destroy()
    launch({"size": 2, "mode": "1d"})
    with pytest.raises(ValueError, match=r"mode='3d'\): the job's tensor mode is '1d'"):
        colossalai.nn.parallelize(zoo.build("gpt2"), "3d")


def test_refusals_of_a_launched_job() -> None:
    spawn(check_refusals, 2)


def check_batch(rank: int, world_size: int, port: int) -> None:
    launch(MODES["2d"])
    model = colossalai.nn.parallelize(zoo.build("gpt2"))
    with pytest.raises(ValueError, match=r"a batch of 3 rows is shared by row=2 = 2 ranks; .* 2 and 4"):
        model(input_ids=torch.ones(3, 4, dtype=torch.long))
    model = colossalai.nn.parallelize(zoo.build("t5").eval())
    ids, states = torch.ones(4, 5, dtype=torch.long), torch.zeros(4, 5, 16)
    with pytest.raises(
        ValueError, match=r"encoder_hidden_states of 4 rows do not fit a batch of 4, .* own encoder"
    ):
        model(encoder_outputs=(states,), decoder_input_ids=ids)


def test_a_batch_that_does_not_divide() -> None:
    spawn(check_batch, 4)


def test_models_that_need_whole_scores() -> None:
    with pytest.raises(
        ValueError, match=r"whole_scores=False is for causal .* as BertForMaskedLM does not; leave"
    ):
        _cut(_meta("bert"), whole_scores=False)
    with pytest.raises(
        ValueError, match=r"head is cut .* as Gemma2ForCausalLM does not"
    ):  # its table is special
        _cut(_meta("gemma2"), whole_scores=False)
    with pytest.raises(ValueError, match="a Linear that computes the loss; give whole_scores=False to par"):
        _cut(colossalai.nn.chunk_causal_loss(_meta("llama"), whole_scores=False))


def test_rules_for_other_modules() -> None:
    from colossalai.nn.policies import Cut, Head, Norm, Policy, Rule
    from colossalai.nn.policies.cutting.hugging_face import GPT2

    wrong: dict[str, tuple[Rule, str]] = {
        "ln_f": (Cut("expand"), r"'transformer.ln_f': Cut\(\) is for nn.Linear and Conv1D, got a LayerNorm"),
        "h.*.mlp.c_fc": (Head(), r"Head\(\) is for nn.Linear, got a Conv1D"),
        "wpe": (Norm(), r"Norm\(\) is for nn.LayerNorm, .* got a Embedding"),
    }
    for path, (rule, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            _cut(_meta("gpt2"), "2d", SQUARE, policy=Policy(("gpt2",), {**GPT2.rules, path: rule}))


def test_squares_of_side_one() -> None:
    with pytest.raises(ValueError, match=r"'2.5d' with squares of side 1 cuts nothing but the batch"):
        _cut(_meta("gpt2"), "2.5d", {"dep": 2, "row": 1, "col": 1})


def _hook(*_: Any) -> None: ...


def _patch(layer: Any) -> None:
    layer.forward = layer.forward


HUNG: dict[str, tuple[Any, str]] = {
    "forward": (lambda layer: layer.register_forward_hook(_hook), "forward_hooks"),
    "before": (lambda layer: layer.register_forward_pre_hook(_hook), "forward_pre_hooks"),
    "backward": (lambda layer: layer.register_full_backward_hook(_hook), "backward_hooks"),
    "weight": (lambda layer: layer.weight.register_hook(_hook), "hooks of weight"),
    "patched": (_patch, "a forward of its own"),
    "parametrized": (lambda layer: nn.utils.parametrizations.orthogonal(layer), "parametrizations"),
}


@pytest.mark.parametrize("what", HUNG)
def test_hooks_that_would_be_lost(what: str) -> None:
    hang, words = HUNG[what]
    model = zoo.build("llama")
    hang(model.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ValueError, match=rf"'model.layers.0.mlp.up_proj' has .*{words}.*hooks after parallelize"
    ):
        _cut(model, sizes={"tp": 2})


def test_parameters_in_one_memory() -> None:
    model = zoo.build("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = nn.Parameter(mlp.gate_proj.weight.detach())
    words = (
        "LlamaForCausalLM: the parameters .*layers.0.mlp.gate_proj.weight and .*up_proj.weight lie"
        " in the same memory"
    )
    with pytest.raises(ValueError, match=words):
        _cut(model, sizes={"tp": 2})
    mlp.up_proj.weight = nn.Parameter(mlp.down_proj.weight.detach().t())
    with pytest.raises(
        ValueError, match=r"(down|up)_proj.weight and .*(down|up)_proj.weight lie in the same"
    ):
        _cut(model, sizes={"tp": 2})
    mlp.up_proj.weight = nn.Parameter(mlp.gate_proj.weight.detach().clone())
    _cut(model, sizes={"tp": 2})
