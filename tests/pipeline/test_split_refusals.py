"""What ``split_model`` refuses, and that the model is whole afterwards; partitions and stages without a
job.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.nn.policies import Cut, Depth, Policy
from colossalai.pipeline import save_pretrained, split_model
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing import spawn
from tests.pipeline import plans
from tests.pipeline.plans import config, launch


class Block(nn.Linear):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + super().forward(x).relu()


class Net(nn.Module):
    """A model that no table knows: its blocks are named otherwise, and a table is also the head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.parts = nn.ModuleList(Block(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.table(ids) + (0 if shift is None else shift)
        for part in self.parts:
            x = part(x)
        return self.head(x)


DEPTH = Depth("parts", entry=("table",))
POLICY = Policy(("net",), {}, depth=DEPTH)


def stages_of(model: nn.Module, placement: Placement, **options: Any) -> list[nn.Module]:
    """All stages, in their order."""
    found: dict[int, nn.Module] = {}
    for rank in range(placement.ranks):
        stage = split_model(copy.deepcopy(model), placement, rank, **options)
        for own in stage if isinstance(stage, nn.ModuleList) else [stage]:
            found[own.share.index] = own
    return [found[i] for i in range(placement.stages)]


def sizes(stages: list[nn.Module]) -> list[int]:
    return [len(stage.share.blocks) for stage in stages]


@pytest.mark.parametrize("shape", Shape)
def test_a_policy_of_your_own(shape: Shape) -> None:
    serial, given = Net(5), {"ids": torch.arange(6).view(2, 3), "shift": torch.randn(3, 8)}
    stages = stages_of(serial, Placement(2, 2, shape), policy=POLICY)
    assert [name for stage in stages for name in stage.state_dict()] == list(serial.state_dict())
    assert all(isinstance(stage, Net) for stage in stages)
    x = stages[0](**given)
    for stage in stages[1:]:
        x = stage(x, **given)
    assert torch.equal(x, serial(**given))


def test_partitions() -> None:
    model, place = Net(5), Placement(3)
    assert sizes(stages_of(model, place, policy=POLICY, partition="uniform")) == [1, 2, 2]
    model.table = nn.Embedding(1000, 8)  # outweighs all blocks
    model.head = nn.Linear(8, 1)
    assert sizes(stages_of(model, place, policy=POLICY)) == [1, 2, 2]
    model.head = nn.Linear(8, 1000)
    assert sizes(stages_of(model, place, policy=POLICY)) == [1, 3, 1]
    assert sizes(stages_of(model, place, policy=POLICY, partition=[1, 1, 3])) == [1, 1, 3]
    ids, stages = torch.arange(4), stages_of(model, place, policy=POLICY, partition=[3, 1, 1])
    x = stages[1](stages[0](ids=ids), ids=ids)
    assert torch.equal(stages[2](x, ids=ids), model(ids))


def test_one_stage_is_the_whole_model() -> None:
    model = Net()
    assert split_model(model, policy=POLICY) is model
    assert torch.equal(model(torch.arange(3)), Net.forward(model, torch.arange(3)))


def test_chunks_of_a_rank_share_what_is_tied() -> None:
    first, last = split_model(Net(), Placement(2, 2, Shape.VEE), 0, policy=POLICY)  # type: ignore[misc]
    assert first.table.weight is last.head.weight
    assert not list(last.table.parameters())
    assert not list(first.head.parameters())


def test_a_stand_in_answers_for_the_module() -> None:
    stage = split_model(Net(), Placement(2), 1, policy=POLICY)
    assert stage.table.weight.shape == (11, 8)  # type: ignore[union-attr]
    assert stage.table.weight.is_meta  # type: ignore[union-attr]
    assert len(stage.parts) == 4  # type: ignore[arg-type]
    assert copy.deepcopy(stage).table.num_embeddings == 11  # type: ignore[union-attr]
    with pytest.raises(AttributeError, match="nonsense"):
        stage.table.nonsense  # type: ignore[union-attr]  # noqa: B018


class Scaled(nn.Module):
    """A layer in a wrapper with a parameter of its own, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def test_a_layer_that_is_wrapped_on_all_ranks_belongs_to_the_stage_that_holds_it() -> None:
    serial, ids = Net(), torch.arange(6).view(2, 3)
    serial.parts = nn.ModuleList(plans.Block() for _ in range(5))
    stages = stages_of(serial, Placement(2), policy=POLICY)
    for model in (serial, *stages):
        for part in model.parts:  # type: ignore[union-attr]
            part.up = Scaled(part.up)
            part.gate = nn.Parameter(torch.ones(8))
            part.register_parameter("late", nn.Parameter(torch.ones(8)))
            part.register_buffer("seen", torch.ones(8))
            part.add_module("adapter", nn.Linear(8, 1))
            assert isinstance(part.up.inner, nn.Linear)
            assert part.gate.shape == (8,)
    assert [name for stage in stages for name in stage.state_dict()] == list(serial.state_dict())
    assert not any(p.is_meta for stage in stages for p in stage.parameters())
    assert torch.equal(stages[1](stages[0](ids=ids), ids=ids), serial(ids))


def train_once(model: nn.Module, plugin: TorchDDPPlugin | None) -> None:
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"ids": torch.arange(8).view(4, 2)}, torch.zeros(4)
    booster.execute_pipeline(iter([batch]), model, lambda out, _: out.sum(), optimizer)


def check_wrapped_blocks(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 2))
    told = r"parts\.0 is on another stage, and a wrapper .* before split_model"
    for plugin in (TorchDDPPlugin(), None):
        stage: Any = split_model(Net(), Placement(2), rank, policy=POLICY)
        stage.parts[0] = Scaled(stage.parts[0])
        with pytest.raises(ValueError, match=told):
            train_once(stage, plugin)
        stage = split_model(Net(), Placement(2), rank, policy=POLICY)
        stage.parts[0] = checkpoint_wrapper(stage.parts[0])
        train_once(stage, plugin)


def test_a_block_that_is_wrapped_where_another_stage_holds_it_is_refused() -> None:
    spawn(check_wrapped_blocks, 2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_other_ranks_hold_is_freed(chunks: int) -> None:
    model = Net()
    alive = {name: weakref.ref(p) for name, p in model.named_parameters()}
    stage = split_model(model, Placement(2, chunks, Shape.VEE), 0, policy=POLICY)
    del model
    gc.collect()
    own = {id(p) for p in stage.parameters()}
    assert {id(p) for ref in alive.values() if (p := ref()) is not None} == own
    assert len(own) < len(alive)


class Gated(Net):
    """A parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(), Net()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"partition": [2, 1]},
            ValueError,
            r"Net has 4 blocks for 2 stages, but partition=\[2, 1\] gives 3 to 2",
        ),
        ({"partition": [4]}, ValueError, r"gives 4 to 1"),
        ({"partition": 2}, ValueError, r"partition=2\): it is 'balanced', 'uniform', or the numbers"),
        ({"partition": [5, -1]}, ValueError, r"whole numbers of at least 1, got partition=\[5, -1\]"),
        ({"partition": [2, 2.0]}, ValueError, r"whole numbers"),
        ({"partition": [0, 4]}, ValueError, r"whole numbers of at least 1"),
        (
            {"partition": "even"},
            ValueError,
            r"partition='even'\): it is 'balanced', 'uniform', or the numbers",
        ),
        ({"placement": Placement(5)}, ValueError, r"Net has 4 blocks, fewer than the 5 stages"),
        ({"rank": 2}, ValueError, r"ranks 0 to 1, got 2"),
        (
            {"policy": None},
            ValueError,
            r"how Net \(model_type None\) is cut in depth: neither a policy nor .* no list of like blocks",
        ),
        ({"policy": Policy(("net",), {})}, ValueError, r"neither a policy nor its config"),
        (
            {"policy": Policy(("net",), {}, depth=Depth("layers", entry=()))},
            ValueError,
            r"one nn.ModuleList at 'layers', and it has no such list",
        ),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Net()
    names = list(model.state_dict())
    given = {"placement": Placement(2), "rank": 0, "policy": POLICY, **options}
    with pytest.raises(error, match=message):
        split_model(model, **given)
    assert list(model.state_dict()) == names
    assert type(model) is Net


def test_models_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"parameter 'gate' belongs to a module that all stages hold"):
        split_model(Gated(), Placement(2), 0, policy=POLICY)
    with pytest.raises(ValueError, match=r"at 'parts', and it has 2 modules with such a list"):
        split_model(Twice(), Placement(2), 0, policy=POLICY)
    stage = split_model(Net(), Placement(2), 1, policy=POLICY)
    with pytest.raises(ValueError, match=r"this Net is stage 1 of 2 already; split a model once"):
        split_model(stage, Placement(2), 1, policy=POLICY)
    for chunked in (nn.ModuleList([stage]), nn.Sequential(stage)):
        with pytest.raises(ValueError, match=r"holds stage 1 of 2 already"):
            split_model(chunked, Placement(2), 1, policy=POLICY)


def test_calls_that_a_stage_refuses() -> None:
    stage = split_model(Net(), Placement(2), 1, policy=POLICY)
    with pytest.raises(
        TypeError, match=r"stage 1 of Net takes what the stage before .* \(hidden_states\), got none"
    ):
        stage(ids=torch.arange(3))
    with pytest.raises(
        TypeError, match=r"stage 1 of Net got hidden states and no batch.*make every batch a dict"
    ):
        stage(torch.randn(3, 8))
    with pytest.raises(RuntimeError, match=r"stage 1 of 2, not the whole model; call colossalai.save_pret"):
        stage.save_pretrained("folder")  # type: ignore[operator]
    for model in (Net(), stage):
        with pytest.raises(TypeError, match=r"needs a model that has this method.*got a Net"):
            save_pretrained(model, "folder")
    forgotten = split_model(Net(), Placement(2), 0, policy=Policy((), {}, depth=Depth("parts", entry=())))
    with pytest.raises(RuntimeError, match=r"'table' is called before the blocks .*name it in the entry"):
        forgotten(ids=torch.arange(3))


def test_hugging_face_models_that_cannot_be_split() -> None:
    pytest.importorskip("transformers", reason="needs `pip install transformers`")
    from transformers import AlbertConfig, AlbertModel

    from tests.nn.policies import zoo

    albert = AlbertModel(
        AlbertConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=9, num_hidden_layers=1
        )
    )
    with pytest.raises(
        ValueError,
        match=r"AlbertModel \(model_type 'albert'\).*no list of like blocks .* It knows gpt2, bert",
    ):
        split_model(albert, Placement(2), 0)
    with pytest.raises(
        ValueError, match=r"OPTForCausalLM: layerdrop=0.5 may drop the blocks where stages meet"
    ):
        split_model(zoo.build("opt", layerdrop=0.5), Placement(2), 0)


def check_job(rank: int, world_size: int, port: int) -> None:
    settings = config("1f1b", 2, 2)
    settings["parallel"]["tensor"] = {"size": 2, "mode": "1d"}
    launch(settings)
    with pytest.raises(ValueError, match=r"a placement on 3 ranks, but the pipeline of the job has 2"):
        split_model(Net(), Placement(3), policy=POLICY)
    policy = Policy(("net",), {"table": Cut("expand")}, depth=DEPTH)
    with pytest.raises(ValueError, match=r"Net, module 'table': Cut\(\) is for nn.Linear"):
        split_model(Net(), policy=policy)
    assert split_model(Net(), policy=POLICY).share.index == rank // 2 % 2


def test_in_a_job() -> None:
    spawn(check_job, 4)


def _moe(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **options))


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_outputs_of_all_blocks_are_refused(name: str) -> None:
    """They are collected on the last stage, from its own blocks alone; so is the loss of the routers."""
    told = (
        rf"MixtralForCausalLM cannot be a stage of a pipeline with config\.{name}=True.* set"
        rf" config\.{name}=False"
    )
    with pytest.raises(ValueError, match=told):
        split_model(_moe(**{name: True}), Placement(2), 0)
    split_model(_moe(**{name: True}), Placement(1), 0)  # it has all blocks
    first, last = stages_of(_moe(), Placement(2))
    ids = torch.zeros(2, 3, dtype=torch.long)
    for stage, args in ((first, ()), (last, (torch.zeros(2, 3, 8),))):
        with pytest.raises(ValueError, match=f"with {name}=True in the batch.* leave it out"):
            stage(*args, input_ids=ids, **{name: True})
        with pytest.raises(ValueError, match=r"takes no num_items_in_batch.* mean"):
            stage(*args, input_ids=ids, num_items_in_batch=torch.tensor(6))
        stage(*args, input_ids=ids)
    setattr(last.config, name, True)  # after the split
    with pytest.raises(ValueError, match=r"'(router_logits|hidden_states)' among its outputs"):
        last(torch.zeros(2, 3, 8), input_ids=ids)
