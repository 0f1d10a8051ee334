"""Models of transformers whose sequences are cut over ranks train as the serial ones do."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.mesh import Mesh
from colossalai.nn.checkpoint_blocks import checkpoint_blocks
from colossalai.nn.policies.cutting.causal_loss import chunk_causal_loss
from colossalai.nn.policies.sequences.plan import plan_sequence
from colossalai.nn.sequence import SequenceParallel
from colossalai.testing import RankError, fake_world, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial, check_plan

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import derived_zoo, zoo  # noqa: E402
from tests.nn.policies.sequence_cases import (  # noqa: E402
    EXACT,
    Case,
    SequenceRun,
    build,
    check_cases,
    launch,
)
from tests.pipeline.hugging_face import StagedRun  # noqa: E402
from tests.rows.plans import PLUGINS  # noqa: E402

ONE_D = {"size": 2, "mode": "1d"}
RING, ULYSSES = {"size": 2, "attention": "ring"}, {"size": 2, "attention": "ulysses"}
BOTH = {"size": 4, "attention": "both"}

# A spread of families and sequences over plans: (ranks, plan, cases)
SAMPLE: list[tuple[int, dict[str, Any], list[Case]]] = [
    (
        2,
        {"sequence": RING},
        [Case("llama"), Case("gpt2", "padded"), Case("bert", "padded", 5), Case("bert", length=1)],
    ),
    (
        2,
        {"tensor": {"size": 2, "mode": "sequence"}},
        [Case("llama", "packed", whole_scores=False), Case("opt", "padded"), Case("gpt2", length=2)],
    ),
    (
        4,
        {"sequence": ULYSSES},  # and two replicas
        [Case("llama", "padded", whole_scores=False), Case("roberta", "padded"), Case("vit")],
    ),
    (4, {"sequence": BOTH}, [Case("gpt2", "packed", 9, whole_scores=False), Case("bert", length=3)]),
    (
        4,
        {"sequence": RING, "tensor": ONE_D},
        [Case("llama", "packed", whole_scores=False), Case("bert", "padded"), Case("gpt_neox")],
    ),
]


@pytest.mark.parametrize(
    ("ranks", "plan", "cases"), SAMPLE, ids=["ring", "mode", "ulysses-dp2", "both", "ring-1d"]
)
def test_a_cut_sequence_trains_as_the_whole_one(ranks: int, plan: dict[str, Any], cases: list[Case]) -> None:
    spawn(check_cases, ranks, cases=cases, timeout=300.0, **plan)


PLANS: list[tuple[int, dict[str, Any]]] = [
    *((2, {"sequence": {"size": 2, "attention": kind}}) for kind in ("ring", "ulysses")),
    *((4, {"sequence": {"size": 2, "attention": kind}}) for kind in ("ring", "ulysses")),
    *((4, {"sequence": {"size": 4, "attention": kind}}) for kind in ("ring", "ulysses", "both")),
    *((4, {"sequence": {"size": 2, "attention": kind}, "tensor": ONE_D}) for kind in ("ring", "ulysses")),
    (8, {"sequence": 8}),
    (8, {"sequence": {"size": 8, "attention": "both"}}),
]
FAMILIES = (
    *("gpt2", "llama", "bert", "opt", "qwen2", "qwen3", "vit", "gpt_neox", "starcoder2", "phi3"),
    *("roberta", "distilbert", "albert", "electra", "biogpt", "stablelm", "persimmon", "deit"),
)
PACKED = ("gpt2", "llama", "qwen2", "qwen3", "gpt_neox", "phi3", "opt")
FROM_PIECES = ("gpt2", "llama", "qwen2", "opt", "gpt_neox")


def all_cases(number: int) -> list[Case]:
    """Every family with every kind of sequence it knows; of lengths that change from plan to plan."""
    kinds = [(name, kind) for name, kind in product(FAMILIES, ("plain", "padded"))]
    kinds += [(name, "packed") for name in PACKED]
    lengths = (12, 11, 7, 5, 3, 2)
    return [
        Case(name, kind, lengths[(number + i) % 6], whole)
        for i, (name, kind) in enumerate(kinds)
        for whole in ((True, False) if name in FROM_PIECES and kind != "plain" else (True,))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_all_families_kinds_and_plans(number: int, part: int) -> None:
    ranks, plan = PLANS[number]
    spawn(check_cases, ranks, cases=all_cases(number)[part::6], timeout=600.0, **plan)


def without_one_sum(task: Problem) -> SequenceRun:
    """The losses of the other ranks' tokens are left out."""
    launch(sequence=RING)
    SequenceParallel.total = lambda self, x: x * self.size  # type: ignore[method-assign]
    return SequenceRun(task, PLUGINS["ddp"](), whole_scores=False)


def test_without_the_sum_over_ranks_the_loss_is_wrong() -> None:
    with pytest.raises(RankError, match="ParityError: loss at step 0 differs"):
        assert_equal_to_serial(Case("llama").problem, without_one_sum, 2)


# ---- plugins, pipelines, recomputation ----


def check_plugins(rank: int, world_size: int, port: int, folder: str, **plan: Any) -> None:
    """Plans that show no gradients: losses, norms and the weights that they save."""
    launch(**plan)
    for plugin in ("zero2", "gemini", "fsdp"):
        task = Case("llama", "padded", whole_scores=False).problem()
        task = replace(task, build=lambda build=task.build: build().float())  # type: ignore[misc]
        run, model = SequenceRun(task, PLUGINS[plugin](), whole_scores=False), task.build()
        optimizer = task.optimizer(model.parameters())
        for batch in task.batches:
            loss = task.loss(model, batch)
            loss.backward()
            torch.testing.assert_close(run.forward_backward(batch), loss.detach().float(), rtol=1e-5, atol=0)
            run.update()
            optimizer.step()
            optimizer.zero_grad()
        path = Path(folder) / f"{plugin}.bin"
        run.booster.save_model(run.model, path)
        dist.barrier()
        saved = torch.load(path, weights_only=True)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(saved[name], expected, rtol=1e-4, atol=2e-5, msg=f"{plugin}: {name}")
        dist.barrier()


def test_sharded_plugins(tmp_path: Path) -> None:
    spawn(check_plugins, 4, folder=str(tmp_path), timeout=300.0, sequence=RING)


def staged(task: Problem, schedule: str, whole_scores: bool, **parallel: Any) -> StagedRun:
    chunks = 2 if schedule == "interleaved" else 1
    config = {"parallel": {"pipeline": {"size": 2, "schedule": schedule}, **parallel}}
    colossalai.launch_from_torch(
        {**config, "NUM_MICRO_BATCHES": 2, "NUM_CHUNKS": chunks}, backend="gloo", verbose=False
    )
    cut = partial(colossalai.nn.parallelize, whole_scores=whole_scores)
    return StagedRun(replace(task, build=lambda: cut(task.build())))


STAGES: list[tuple[Case, str, dict[str, Any], int]] = [
    (Case("llama", "packed", whole_scores=False), "1f1b", {"sequence": RING}, 4),
    (Case("gpt2", "padded"), "zbh1", {"sequence": ULYSSES}, 4),
    (Case("bert", "padded", 5), "1f1b", {"tensor": {"size": 2, "mode": "sequence"}}, 4),
    (Case("vit"), "1f1b", {"sequence": RING}, 4),
    pytest.param(
        Case("llama", "padded"), "1f1b", {"sequence": RING, "tensor": ONE_D}, 8, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("case", "schedule", "parallel", "ranks"), STAGES, ids=lambda value: str(value)[:20])
def test_stages(case: Case, schedule: str, parallel: dict[str, Any], ranks: int) -> None:
    plan = partial(staged, schedule=schedule, whole_scores=case.whole_scores, **parallel)
    exact = replace(EXACT, loss=1e-6)  # a pipeline tells its loss in float32
    assert_equal_to_serial(case.problem, plan, ranks, tolerance=exact)


def recomputed(model: nn.Module, how: str) -> nn.Module:
    if how == "transformers":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model
    return checkpoint_blocks(model, how)  # type: ignore[arg-type]


def check_recomputation(rank: int, world_size: int, port: int) -> None:
    launch(sequence=RING)
    for how in ("transformers", "full", "selective"):
        task = Case("llama", "packed", whole_scores=False).problem(2)
        build = partial(recomputed, how=how)
        check_plan(
            task,
            lambda p, build=build: SequenceRun(  # type: ignore[misc]
                p, PLUGINS["ddp"](), whole_scores=False, then=build
            ),
            tolerance=EXACT,
        )


def test_recomputation() -> None:
    spawn(check_recomputation, 2)


# ---- what users do with a model ----


def check_habits(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(sequence=RING)
    serial = build("llama").eval()
    model = colossalai.nn.parallelize(copy.deepcopy(serial))
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = serial(ids, output_hidden_states=True)
        own = model(ids, output_hidden_states=True)
        torch.testing.assert_close(own.logits, whole.logits)
        for got, expected in zip(own.hidden_states, whole.hidden_states, strict=True):
            torch.testing.assert_close(got, expected)
        as_tuple = model(ids, return_dict=False)
        torch.testing.assert_close(as_tuple[0], whole.logits)
        by_features = model(inputs_embeds=serial.get_input_embeddings()(ids))
        torch.testing.assert_close(by_features.logits, whole.logits)
    kept = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    assert torch.equal(model.generate(ids, **kept), serial.generate(ids, **kept))
    torch.testing.assert_close(model(ids).logits, whole.logits)  # and it is cut again
    with pytest.raises(ValueError, match=r"output_attentions=True\): the sequence is cut"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="there is no cache of keys and values while training"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match=r"attention_mask must say which tokens are padding, \(2, 7\)"):
        model(ids, attention_mask=torch.ones(2, 1, 7, 7))
    model.save_pretrained(folder)
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert again.config._attn_implementation == "sdpa"
    for name, tensor in again.double().state_dict().items():
        torch.testing.assert_close(tensor, serial.state_dict()[name])


def check_outputs_of_bodies(rank: int, world_size: int, port: int) -> None:
    """Caches, where a model without a head is its own body; failures; the scores of routers."""
    launch(sequence=RING)
    serial = build("llama").model
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    bare = colossalai.nn.parallelize(copy.deepcopy(serial))
    with torch.no_grad():
        cached = bare(ids, use_cache=True)
        assert cached.past_key_values.get_seq_length() == 7
        torch.testing.assert_close(cached.last_hidden_state, serial(ids).last_hidden_state)
    eager: Any = build("llama")  # its softmax is rounded to float32, also in float64
    eager.set_attn_implementation("eager")
    eager_serial = copy.deepcopy(eager)
    torch.testing.assert_close(
        colossalai.nn.parallelize(eager)(ids).logits, eager_serial(ids).logits, rtol=1e-6, atol=1e-6
    )
    failing: Any = zoo.build("llama")
    inner = failing.model.layers[0].mlp.forward
    failing.model.layers[0].mlp.forward = lambda x: inner(x)[:, : 3 if x.size(1) == 4 else 8]  # 8 tokens in 2
    with pytest.raises(RuntimeError, match=r"on rank 0 its forward fails with RuntimeError: The size of"):
        colossalai.nn.parallelize(failing)

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**sizes, **heads, experts_implementation="eager")
    experts: Any = transformers.MixtralForCausalLM(config).double()
    routed = colossalai.nn.parallelize(copy.deepcopy(experts))
    for mask in (None, torch.ones_like(ids)):
        outs = [m(ids, attention_mask=mask, output_router_logits=True) for m in (routed, experts)]
        torch.testing.assert_close(outs[0].aux_loss, outs[1].aux_loss)  # balances the experts of all tokens
        outs[0].aux_loss.backward()
        outs[1].aux_loss.backward()
    gates = [m.model.layers[0].mlp.gate.weight.grad for m in (routed, experts)]
    dist.all_reduce(gates[0])
    torch.testing.assert_close(gates[0] / 2, gates[1])


def test_outputs_of_bodies() -> None:
    spawn(check_outputs_of_bodies, 2)


def check_models_without_memory(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(sequence=RING)
    serial = build("llama").float()
    if rank == 0:
        serial.save_pretrained(folder)
    dist.barrier()
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    with LazyInitContext():
        lazy = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(serial.config)
    lazy = LazyInitContext.materialize(colossalai.nn.parallelize(lazy))
    for model in (lazy, load_pretrained(colossalai.nn.parallelize(empty), folder)):
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, serial(ids).logits)


def test_habits(tmp_path: Path) -> None:
    spawn(check_habits, 2, folder=str(tmp_path))


def test_models_without_memory(tmp_path: Path) -> None:
    spawn(check_models_without_memory, 2, folder=str(tmp_path))


def check_dropout(rank: int, world_size: int, port: int) -> None:
    """Ranks of a sequence drop independently; those of tensor parallelism alike, where they hold the same."""
    launch(sequence=RING, tensor=ONE_D)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    model = colossalai.nn.parallelize(zoo.build("gpt2", **rates), verify=False)
    seen: list[torch.Tensor] = []
    model.transformer.drop.register_forward_hook(lambda _, __, out: seen.append(out == 0))
    torch.manual_seed(0)
    ids = torch.full((2, 8), 7)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()  # the first step compares gradients of copies over the tensor axis
    for axis, alike in (("tp", True), ("sp", False)):
        others = [torch.empty_like(seen[0]) for _ in range(2)]
        dist.all_gather(others, seen[0], group=gpc.mesh.group(axis))
        assert torch.equal(*others) is alike, axis


def test_dropout() -> None:
    spawn(check_dropout, 4)


def check_losses(rank: int, world_size: int, port: int) -> None:
    """A head that computes the loss itself, a number of items that the script counts, and adapters."""
    peft = pytest.importorskip("peft", reason="needs `pip install peft`")
    launch(sequence=RING)
    case = Case("llama", "padded")
    task, model = case.problem(), partial(SequenceRun, plugin=PLUGINS["ddp"](), whole_scores=False)
    in_head = replace(task, build=lambda: chunk_causal_loss(task.build(), whole_scores=False))
    check_plan(in_head, model, tolerance=EXACT)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(task.build(), lora).double()

    check_plan(replace(task, build=adapted), partial(model, whole_scores=True), tolerance=EXACT)
    cut, batch = colossalai.nn.parallelize(task.build(), whole_scores=False), task.batches[0]
    valid = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(cut(**batch, num_items_in_batch=2 * valid).loss * 2, cut(**batch).loss)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(cut(**batch, shift_labels=shifted).loss, cut(**batch).loss)
    assert cut(**batch).logits.shape[:2] == (4, 6)  # of this rank's tokens, with one that was added
    assert cut(**{**batch, "labels": None}).logits.shape[:2] == (4, 11)
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        cut(**batch, logits_to_keep=1)
    longer = torch.nn.functional.pad(batch["labels"], (0, 1), value=7)  # padded to as many as the tokens are
    with pytest.raises(ValueError, match=r"labels of shape \(4, 12\) do not fit the tokens, .* \(4, 11\)"):
        cut(**{**batch, "labels": longer})
    check_without_labels(task.build(), cut, batch)


def check_without_labels(serial: Any, cut: Any, batch: dict[str, Any]) -> None:
    """Nothing is learnt of a batch without any label, and no weight is lost, as with the loss of torch."""
    given = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    chunked = [chunk_causal_loss(copy.deepcopy(serial), whole_scores=whole) for whole in (True, False)]
    for model in (serial, cut, *chunked):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        assert loss.isnan()
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_losses() -> None:
    spawn(check_losses, 2)


# ---- what is refused ----


def cut(model: nn.Module, **axes: int) -> Any:
    return colossalai.nn.parallelize(model, mesh=Mesh(axes or {"sp": 2}))


def tiny(kind: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 16}
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config(**sizes, num_attention_heads=4, **options))


def beit(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = transformers.BeitConfig(**sizes, image_size=12, patch_size=4, **options)
    return transformers.BeitForImageClassification(config)


REFUSED = {
    "t5": "has an encoder and a decoder",
    "bart": "has an encoder and a decoder",
    "gemma2": r"layers\.0\.self_attn caps its scores \(softcap\)",
    "bloom": "none of its attention goes through transformers' AttentionInterface",
    "beit": "a mask that the model has changed",
    "wav2vec2": "takes input_values",
    "clip": "takes input_ids and pixel_values",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    model = zoo.build(name) if name in zoo.BUILD else derived_zoo.build(name)
    with fake_world(rank=0, world_size=2), pytest.raises(ValueError, match=REFUSED[name]):
        cut(model)


def test_kinds_of_attention_that_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with fake_world(rank=0, world_size=2):
        with pytest.raises(ValueError, match=r"has attention sinks \(s_aux\)"):
            cut(tiny("GptOss", num_key_value_heads=2, head_dim=4, num_local_experts=2))
        with pytest.raises(ValueError, match="some of its layers have linear attention"):
            cut(tiny("Mamba"))
        kinds = {"layer_types": ["linear_attention"], "num_experts": 2, "head_dim": 4}
        with pytest.raises(ValueError, match="some of its layers have linear attention"):
            cut(tiny("Qwen3Next", num_key_value_heads=2, **kinds))
        with pytest.raises(ValueError, match=r"its rotations \('dynamic'\) depend on the last position"):
            cut(tiny("Llama", rope_parameters=dynamic))
        with pytest.raises(ValueError, match=r"layerdrop=0\.5 drops whole layers"):
            cut(zoo.build("opt", layerdrop=0.5))
        with pytest.raises(ValueError, match=r"layers\.1\.drop_path drops whole samples"):
            cut(beit(drop_path_rate=0.1))
        cut(beit(drop_path_rate=0.0))
        with pytest.raises(ValueError, match="parallelize cuts the sequences of models of transformers"):
            cut(nn.Linear(2, 2))
    words = r"cannot share 4 heads among 3 ranks; launch with .*'ring'"
    with fake_world(rank=0, world_size=3), pytest.raises(ValueError, match=words):
        plan_sequence(tiny("Llama"), SequenceParallel(Mesh({"su": 3}), heads="su"), 1)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch(sequence=RING)
    ids = torch.randint(5, 100, (2, 8), generator=torch.Generator().manual_seed(rank))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 share one model \(sp=2\) and were given different"):
        colossalai.nn.parallelize(zoo.build("llama"))(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="its sliding window is 4 tokens, shorter than the sequence of 8"):
        colossalai.nn.parallelize(zoo.build("mistral")).eval()(input_ids=ids)
    mixing: Any = zoo.build("llama")
    inner = mixing.model.layers[0].mlp.forward
    mixing.model.layers[0].mlp.forward = lambda x: inner(x + x.roll(1, 1))  # each token sees the one before
    with pytest.raises(RuntimeError, match=r"does not compute what the whole model does.* mixes tokens"):
        colossalai.nn.parallelize(mixing)


def test_what_differs_is_refused_on_every_rank() -> None:
    spawn(check_refusals, 2)


def _plain_loop(**place: Any) -> None:
    launch(sequence=RING)
    model = colossalai.nn.parallelize(zoo.build("llama"))
    ids = torch.zeros(2, 6, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"sequences of which each rank has some tokens.*was not boosted"):
        model.train()(input_ids=ids)


def test_a_plain_loop_is_told_that_nothing_averages() -> None:
    spawn(_plain_loop, 2)
