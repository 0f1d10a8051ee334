"""The graph of a model computes what the model does, and what it says of costs is what a step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from colossalai.fx import InputError, OpGraph, trace_model, trace_step
from colossalai.lazy import LazyInitContext
from colossalai.utils.meta import gpu_kernels
from colossalai.utils.throughput import count_operations
from tests.fx.models import FAMILIES, Asking, Numpy, build
from tests.lazy import vision

Step = tuple[Tensor, dict[str, Tensor]]


def step(model: nn.Module, run: Callable[..., Any], *args: Any, **batch: Any) -> Step:
    """The loss and the gradients of a step, after which buffers are as they were."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(1)
    model.zero_grad()
    output = run(*args, **batch)
    loss = output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Step, want: Step, tolerance: float = 1e-5) -> None:
    assert torch.allclose(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=tolerance, atol=tolerance, msg=name)


def kept_bytes(model: nn.Module, run: Callable[[], Any]) -> int:
    """The memory that autograd keeps for a backward pass, without that of the model."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(t.untyped_storage().nbytes() for s, t in found.items() if s not in own)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    model, batch = build(family)
    before = dict((*model.named_parameters(), *model.named_buffers()))
    graph = trace_model(model, **batch)
    assert graph.route == "export"
    assert not graph.failures
    assert dict((*model.named_parameters(), *model.named_buffers())).items() == before.items()
    reference = model
    if family == "opt":  # the graph has all layers
        model.model.decoder.layerdrop = 0.0
        assert any("left out at a rate of 0.5" in note for note in graph.notes)
    want = step(reference, reference, **batch)
    assert_same(step(model, graph, **batch), want)
    total = count_operations(lambda: step(model, graph, **batch))
    assert graph.forward.operations + graph.backward.operations == total
    assert graph.saved_bytes == kept_bytes(model, lambda: graph(**batch))
    assert not graph.without_rule
    read = {name for node in graph for name in node.parameters}
    assert want[1].keys() <= read <= set(graph.parameters)
    linear = [n for n in graph if n.operation in ("aten.linear.default", "aten.addmm.default")]
    assert len(linear) >= 8
    assert all(n.module in dict(model.named_modules()) for n in graph)
    assert all(model.get_submodule(n.module).get_parameter("weight") is not None for n in linear)


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])
def test_the_second_route_gives_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(family)
    exported = trace_model(model, **batch)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", fail)
    graph = trace_model(model, **batch)
    assert graph.route == "make_fx"
    assert graph.failures == {"export": "RuntimeError: not today"}
    assert_same(step(model, graph, **batch), step(model, model, **batch))
    assert (graph.forward.operations, graph.backward.operations) == (
        exported.forward.operations,
        exported.backward.operations,
    )
    assert graph.saved_bytes == kept_bytes(model, lambda: graph(**batch))
    products = [[(n.module, n.parameters) for n in g if n.forward.operations] for g in (graph, exported)]
    assert products[0] == products[1]


_SAMPLE = ("torchvision resnet18", "timm vit_tiny_patch16_224")
_OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in vision.MODELS if kind not in _SAMPLE]


@pytest.mark.parametrize("kind", [*_SAMPLE, *_OTHERS])
def test_models_of_vision(kind: str) -> None:
    if not vision.are_installed():
        pytest.skip("needs requirements/vision.txt (`make install`)")
    torch.manual_seed(0)
    model, images, labels = vision.builder(kind)().train(), vision.images(kind), torch.tensor([1, 2])
    graph = trace_model(model, images, loss=cross_entropy, targets=(labels,))
    assert graph.route == "export"
    want = step(model, lambda x: cross_entropy(model(x), labels), images)
    assert_same(step(model, lambda x: graph(x, loss_targets=(labels,)), images), want, 1e-4)
    total = count_operations(lambda: step(model, lambda x: cross_entropy(model(x), labels), images))
    assert graph.forward.operations + graph.backward.operations == total
    assert graph.saved_bytes == kept_bytes(model, lambda: graph(images, loss_targets=(labels,)))


def test_modules_that_ask_for_values_are_leaves() -> None:
    torch.manual_seed(0)
    model, x = Asking(), torch.randn(4, 8)
    graph = trace_model(model, x, scale=2.0)
    assert graph.route == "modules"
    assert [leaf.path for leaf in graph.leaves] == ["branches.0", "branches.1", "selection"]
    assert "models.py" in graph.leaves[0].line
    assert graph.leaves[0].line.endswith("if x.sum() > 0:")
    assert "result[rows]" in graph.leaves[2].line
    assert graph.failures["make_fx"].startswith("branches.0: its code depends on the values")
    assert_same(step(model, graph, x, scale=2.0), step(model, model, x, scale=2.0), 1e-6)
    assert "unused" not in {name for node in graph for name in node.parameters}
    by_name = {node.name: node for node in graph}
    assert by_name["branches_0"].parameters == ("branches.0.inner.weight", "branches.0.inner.bias")
    assert by_name["branches_0"].forward.operations == 2 * 4 * 8 * 8
    assert by_name["branches_0"].backward.operations == 2 * 2 * 4 * 8 * 8
    assert [n.name for n in graph if n.random] == ["dropout"]
    assert [n.parameters for n in graph if n.module == "last"] == [("first.weight", "last.bias")]
    assert "leaf branches.0" in str(graph)


def test_a_model_that_asks_itself_is_one_node() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            while x.sum() > 10:
                x = x / 2
            return x.sum()

    model, x = Root(8, 8), torch.randn(4, 8)
    graph = trace_model(model, x)
    assert [leaf.path for leaf in graph.leaves] == [""]
    assert len(graph) == 1
    assert_same(step(model, graph, x), step(model, model, x))


def test_code_outside_torch_runs_on_real_tensors() -> None:
    torch.manual_seed(0)
    model, x = Numpy(), torch.randn(4, 8)
    graph = trace_model(model, x)
    (leaf,) = graph.leaves
    assert leaf.path == "outside"
    assert "real tensors only" in leaf.reason
    assert "numpy" in leaf.reason
    (node,) = (n for n in graph if n.name == "outside")
    assert node.estimated
    assert node.forward.operations == 2 * 4 * 8 * 4
    assert node.outputs[0].shape == (4, 4)
    assert graph.without_rule == {"module Outside": ["outside"]}
    assert_same(step(model, graph, x), step(model, model, x))
    with pytest.raises(InputError, match="outside"):
        trace_model(Numpy().to("meta"), x)
    with pytest.raises(TypeError, match=r"needs a module .* got function"):
        trace_model(lambda x: x, x)  # type: ignore[arg-type]


def test_leaves_by_choice() -> None:
    model, batch = build("mixtral")
    graph = trace_model(model, leaf=lambda path, module: path.endswith("mlp"), **batch)
    assert [leaf.path for leaf in graph.leaves] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    whole = trace_model(model, **batch)
    assert graph.forward.operations == whole.forward.operations
    assert graph.backward.operations == whole.backward.operations
    assert_same(step(model, graph, **batch), step(model, model, **batch))
    half = trace_model(model.bfloat16(), **batch)
    assert half.forward.operations == whole.forward.operations
    assert not half.leaves


def test_a_model_without_memory() -> None:
    model, batch = build("gpt2")
    want = trace_model(model, **batch)
    with LazyInitContext():
        unfilled, _ = build("gpt2")
    before = [*unfilled.parameters()]
    for empty in (unfilled, model.to("meta")):
        got = trace_model(empty, **batch)
        assert [(n.name, n.forward, n.backward, n.saved) for n in got] == [
            (n.name, n.forward, n.backward, n.saved) for n in want
        ]
    assert all(a is b for a, b in zip(unfilled.parameters(), before, strict=True))


def test_kernels_of_a_gpu() -> None:
    x = torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16)

    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(*[super().forward(x)] * 3, dropout_p=0.1).sum()

    model = Attention(8, 8).bfloat16()
    here = trace_model(model, x)
    with gpu_kernels():
        there = trace_model(model, x, device="meta")
    scores = 2 * 64 * 64 * x.element_size()
    assert max(here.saved.values()) >= scores > max(there.saved.values())
    assert here.forward.operations == there.forward.operations
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
            trace_model(model, x, device="cuda")


def test_what_runs_in_a_vmap_is_left_out_and_named() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.vmap(lambda i: i >= torch.arange(4))(torch.arange(4))
            return super().forward(x).masked_fill(~keep, 0.0).sum()

    model, x = Masked(4, 4), torch.randn(4, 4)
    graph = trace_model(model, x)
    assert_same(step(model, graph, x), step(model, model, x))
    assert {"vmap"} >= graph.without_rule.keys()
    assert graph.forward.operations == 2 * 4 * 4 * 4
    torch.randn(4, requires_grad=True)  # no transform of torch is left on


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).abs().mean() + 1
            with torch.enable_grad():
                learnt = self.last(x).mean() + self.last(x + 1).mean()
            scale = scale + self.last(x).exp().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.last(x) + 1
        return (self.rnn(x.float())[0] * scale).sum() + learnt


@pytest.mark.parametrize("leaf", [None, lambda path, module: path == "rnn"])
def test_regions_without_gradients_and_under_autocast(leaf: Any) -> None:
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(2, 3, 4)
    weights = list(model.rnn._flat_weights)
    graph = trace_model(model, x, leaf=leaf)
    assert all(a is b for a, b in zip(model.rnn._flat_weights, weights, strict=True))
    assert_same(step(model, graph, x), step(model, model, x), 1e-6)
    assert torch.is_grad_enabled()
    nodes = [n for n in graph if n.operation == "aten.linear.default"]
    assert [n.module for n in nodes] == ["first", "last", "last", "last", "last"]
    assert [n.backward.operations > 0 for n in nodes] == [False, True, True, False, True]
    assert nodes[-1].outputs[0].dtype == torch.bfloat16
    if leaf is None:
        assert any("rnn" in kernel for kernel in graph.without_rule)


def test_bad_inputs() -> None:
    model = Asking()
    with pytest.raises(ValueError, match=r"do not fit Asking.forward\(x: .*missing a required argument: 'x'"):
        trace_model(model, y=torch.zeros(2))
    with pytest.raises(ValueError, match=r"module 'first' of Asking does not run on these inputs.*models.py"):
        trace_model(model, torch.zeros(4, 9))
    with pytest.raises(ValueError, match="takes targets for a loss"):
        trace_model(model, torch.zeros(4, 8), targets=(1,))
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    graph = trace_model(nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="recorded for inputs"):
        graph(torch.zeros(2, 4), 3)
    with pytest.raises(ValueError, match=r"input 0 is \(\(3, 4\), .*recorded for \(\(2, 4\)"):
        graph(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"input 1 is 3.0, and the graph was recorded for 2.0"):
        trace_model(model, torch.zeros(4, 8), scale=2.0)(torch.zeros(4, 8), scale=3.0)
    assert graph.loss is None
    assert graph.backward.operations == 2 * 2 * 4 * 4  # a batch has no gradient


@pytest.mark.parametrize("family", ["gpt2", "opt", "t5", "vit", "llama"])
def test_the_graph_of_a_step(family: str) -> None:
    model, batch = build(family)
    model.double()
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    if family == "opt":
        model.model.decoder.layerdrop = 0.0
    recorded = trace_step(model, **batch)
    loss, grads = step(model, model, **batch)
    torch.manual_seed(1)
    got, found = recorded(**batch)
    assert_same((got, {n: g for n, g in found.items() if g is not None}), (loss, grads), 1e-12)


def test_a_step_that_asks_for_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"module 'branches.0' of Asking.*x.sum\(\) > 0"):
        trace_step(Asking(), torch.randn(4, 8))
    with pytest.raises(ValueError, match="has no loss"):
        trace_step(nn.Linear(4, 4), torch.zeros(2, 4))


def test_nodes_that_gradients_do_not_reach() -> None:
    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.main(x).sum(), "other": self.side(x)}

    graph: OpGraph = trace_model(Side(), torch.zeros(2, 4))
    by_module = {n.module: n for n in graph if n.module}
    assert by_module["main"].backward.operations
    assert not by_module["side"].backward.operations
    assert not by_module["side"].saved


class Counting(nn.Module):
    """Divides by how often it ran."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.fc(x).square().mean() / self.steps


def test_a_buffer_that_is_added_to_is_written_once() -> None:
    """A second write, of itself, would let autograd refuse what was computed with the first."""
    model, x = Counting(), torch.randn(2, 4)
    graph = trace_model(model, x=x)
    assert_same(step(model, graph, x=x), step(model, model, x=x))
    graph(x=x)
    assert model.steps == 1
