"""Any model as pipeline stages: equal to the whole, of which a rank builds nothing but its own part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.pipeline import LayerSpec, PipelinableContext, PipelinableModel
from colossalai.pipeline.pipelinable import POLICIES
from colossalai.testing import parametrize_sample
from tests.pipeline.memory import peak_bytes
from titans.model.gpt import GPT
from titans.model.vit import VisionTransformer

DEPTH = 4


def _x_alone(x: Tensor, mask: Tensor | None) -> Tensor:
    return x


def _key_mask(attention_mask: Tensor) -> Tensor:
    return attention_mask.bool()[:, None, None, :]


def gpt() -> GPT:
    return GPT(64, 8, 16, 2, DEPTH, dropout=0, embedding_dropout=0, attention_dropout=0)


def vit() -> VisionTransformer:
    return VisionTransformer(8, 4, 3, 10, DEPTH, 2, 16, dropout=0)


class CNN(nn.Module):
    """The parts and names of page 41's model, and weights that it draws after its layers have drawn
    theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU())
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


Case = tuple[Callable[[], nn.Module], list[Any], dict[str, Tensor] | Tensor]


def cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (3, 8), generator=generator)
    images = torch.randn(3, 3, 8, 8, generator=generator)
    gpt_blocks: list[Any] = [
        "embed",
        *(f"blocks.{i}" for i in range(DEPTH)),
        (_x_alone, "behind"),
        "norm",
        "head",
    ]
    vit_blocks = ["embed", *(f"blocks.{i}" for i in range(DEPTH)), "norm", "head"]
    layers = ["conv1", "bn1", "relu", "layer1.0", "layer1.1", "avgpool"]
    return {
        "gpt": (gpt, gpt_blocks, {"input_ids": ids}),
        "vit": (vit, vit_blocks, images),
        "cnn": (CNN, [*layers, (lambda x: torch.flatten(x, 1), "behind"), "fc"], images),
    }


def split(sequence: list[Any], parts: int) -> list[Any]:
    """``sequence`` with a SPLIT_NODE after each of its first layers."""
    splits = [[item, "SPLIT_NODE"] for item in sequence[: parts - 1]]
    return [*itertools.chain(*splits), *sequence[parts - 1 :]]


def stages(pipelinable: PipelinableContext, size: int, chunks: int) -> list[nn.Module]:
    """All stages in the order in which a batch passes them."""
    ranks = [pipelinable.partition(chunks, size, rank) for rank in range(size)]
    if chunks == 1:
        return ranks
    return [rank[chunk] for chunk in range(chunks) for rank in ranks]  # type: ignore[index]


def run(model: nn.Module, x: Any, data: dict[str, Tensor]) -> Any:
    return model(**data) if x is None else model(x, **data)


@parametrize_sample(
    "name, policy, size, chunks", list(itertools.product(cases(), POLICIES, [1, 2, 3], [1, 2])), n=23
)
def test_stages_in_a_chain_equal_the_model(name: str, policy: str, size: int, chunks: int) -> None:
    build, sequence, batch = cases()[name]
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    with PipelinableContext(policy, large=16) as pipelinable:
        build()
    pipelinable.to_layer_list(split(sequence, size * chunks) if policy == "customized" else sequence)
    chain = stages(pipelinable, size, chunks)

    whole = model.state_dict()
    parts = [stage.state_dict() for stage in chain]
    assert set().union(*parts) == set(whole)
    for part in parts:
        for key, value in part.items():
            assert torch.equal(value, whole[key]), key

    data, x = (batch, None) if isinstance(batch, dict) else ({}, batch)
    expected = model(**data) if isinstance(batch, dict) else model(batch)
    for stage in chain:
        x = run(stage, x, data)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    expected.square().mean().backward()
    x.square().mean().backward()
    own = {key: p for stage in chain for key, p in stage.named_parameters()}
    for key, p in model.named_parameters():
        total, head = own[key].grad, own.get("head.dense.weight")
        assert total is not None
        if key == "embed.word_embeddings.weight" and head is not None and head is not own[key]:
            total = total + head.grad  # tied, and held by two ranks
        torch.testing.assert_close(total, p.grad)


def test_keywords_reach_the_layers_that_name_them() -> None:
    sequence: list[Any] = [_key_mask, *cases()["gpt"][1]]
    torch.manual_seed(0)
    with PipelinableContext("uniform", large=16) as pipelinable:
        model = gpt()
    assert pipelinable.layers_count == DEPTH + 3
    pipelinable.to_layer_list(sequence)
    assert pipelinable.funcs_count == 2
    first = pipelinable.partition(1, 1, 0)
    ids = torch.randint(64, (2, 8))
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    out = first(input_ids=ids, attention_mask=mask)
    del model
    torch.manual_seed(0)
    expected = gpt()(ids, mask)
    torch.testing.assert_close(out[mask.bool()], expected[mask.bool()])


def test_default_order_is_that_of_definition() -> None:
    with PipelinableContext(large=1) as pipelinable:
        nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 2))
    assert pipelinable.layers_count == 4
    # 40, 0, 72 and 18 parameters
    assert list(pipelinable.partition(1, 2, 0).state_dict()) == ["0.weight", "0.bias"]
    assert list(pipelinable.partition(1, 2, 1).state_dict()) == [
        "1.1.weight",
        "1.1.bias",
        "2.weight",
        "2.bias",
    ]


def test_costs_take_the_place_of_parameters() -> None:
    with PipelinableContext(large=1) as pipelinable:
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model = pipelinable.partition(1, 2, 0, costs=[1, 1, 1, 3])
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    with pytest.raises(ValueError, match=r"one for each of 4 layers; got 2 for the policy 'balanced'"):
        pipelinable.partition(1, 2, 0, costs=[1, 1])


def test_a_stage_takes_no_more_memory_than_its_layers() -> None:
    width, depth, size = 256, 12, 4
    layer = 4 * width * (width + 1)

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    _, whole = peak_bytes(build)
    assert whole >= depth * layer
    pipelinable = PipelinableContext("uniform")

    def stage() -> nn.Module:
        with pipelinable:
            build()
        return pipelinable.partition(1, size, 1)

    model, peak = peak_bytes(stage)
    kept = sum(p.nbytes for p in model.parameters())
    assert kept == depth // size * layer
    # the small biases of all layers, and one weight at a time whose random numbers others use
    assert peak < kept + layer + depth * 4 * width + 100_000
    assert peak < whole / 2


def test_layers_of_colossalai_cost_nothing_elsewhere() -> None:
    pipelinable = PipelinableContext("uniform")

    def record() -> nn.Module:
        with pipelinable:
            return GPT(4096, 64, 128, 4, 8)

    model, peak = peak_bytes(record)
    assert sum(p.nbytes for p in model.parameters()) > 8_000_000
    assert peak < 100_000  # biases and norms
    block = pipelinable.partition(1, 11, 3)
    assert sum(p.nbytes for p in block.parameters()) == 4 * (12 * 128**2 + 13 * 128)


def test_layer_spec() -> None:
    spec = LayerSpec(nn.Linear, 4, 8, bias=False)
    assert spec.param_count == 32
    layer = spec.build()
    assert isinstance(layer, nn.Linear)
    assert not layer.weight.is_meta
    both = LayerSpec(nn.Sequential)
    both.set_children([spec, LayerSpec(nn.Linear, 8, 2)])
    assert both.param_count == both.count_params() == 32 + 18
    assert both.build()(torch.ones(1, 4)).shape == (1, 2)
    spec.kwargs["bias"] = True
    both.reset_param_count()
    assert both.param_count == 40 + 18
    assert repr(spec) == "LayerSpec(Linear, 4, 8, bias=True)"
    with pytest.raises(TypeError, match="LayerSpec needs the class of a layer"):
        LayerSpec("Linear")  # type: ignore[arg-type]


def test_pipelinable_model_by_hand() -> None:
    model = PipelinableModel([nn.Identity(), nn.Identity()], {0: [lambda x: x + 1]}, {1: [lambda x: x * 2]})
    assert model(torch.ones(1)).item() == 4
    assert [name for name, _ in model.named_children()] == ["0", "1"]


def recorded(policy: str = "balanced") -> PipelinableContext:
    with PipelinableContext(policy) as pipelinable:
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return pipelinable


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="is one of balanced, uniform, customized, got 'best'"):
        PipelinableContext("best")
    with pytest.raises(
        ValueError, match=r"exec_seq names the module '7', which Sequential does not have; it has 0, 1"
    ):
        recorded().to_layer_list(["0", "7"])
    with pytest.raises(ValueError, match=r"exec_seq holds names of modules, functions, .* got 3"):
        recorded().to_layer_list(["0", 3])
    with pytest.raises(ValueError, match="behind a layer, but there is none before it"):
        recorded().to_layer_list([(len, "behind"), "0"])
    with pytest.raises(ValueError, match="in front of a layer, but there is none after it"):
        recorded().to_layer_list(["0", (len, "front")])
    with pytest.raises(ValueError, match="comes before it; swap the two"):
        recorded().to_layer_list(["0", (len, "front"), (len, "behind"), "1"])
    with pytest.raises(
        ValueError, match="the model has 2 layers, but 3 pipeline stages with 1 chunk each need"
    ):
        recorded().partition(1, 3, 0)
    with pytest.raises(ValueError, match="has the ranks 0 to 1, got 2"):
        recorded().partition(1, 2, 2)
    with pytest.raises(ValueError, match="needs an exec_seq with 'SPLIT_NODE'"):
        recorded("customized").partition(1, 2, 0)
    with pytest.raises(RuntimeError, match="build the model inside of the PipelinableContext"):
        PipelinableContext().partition(1, 1, 0)
    with (
        pytest.raises(RuntimeError, match="needs one model to be built inside, got 2: Linear, Conv1d"),
        PipelinableContext(),
    ):
        models = nn.Linear(2, 2), nn.Conv1d(1, 1, 1)
    del models
    with pytest.raises(RuntimeError, match="got 0: none"), PipelinableContext():
        pass
    with pytest.raises(RuntimeError, match="has recorded a model"), recorded():
        pass


def test_the_context_leaves_nothing_behind_after_an_error() -> None:
    before = nn.Module.__init__
    with pytest.raises(KeyError), PipelinableContext():
        raise KeyError
    assert nn.Module.__init__ is before
    assert not torch.empty(10_000).is_meta


def test_parameters_that_are_left_out_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    recorded().to_layer_list(["0"])
    assert (
        "2 parameters of Sequential belong to no layer of the pipeline and are left out: 1.weight"
        in "".join(capfd.readouterr())
    )
