"""The documented names of tracing: each does what it says on a small model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

import colossalai
from colossalai._analyzer.fx import symbolic_profile
from colossalai._analyzer.fx.passes import shape_prop_pass
from colossalai._analyzer.fx.tracer.tracer import ColoTracer
from colossalai.fx import (
    ColoGraphModule,
    MetaInfoProp,
    compatibility,
    is_compatible_with_meta,
    meta_trace,
    metainfo_trace,
    symbolic_trace,
)
from colossalai.fx.passes import (
    avgcompute_split_pass,
    avgnode_split_pass,
    balanced_split_pass,
    balanced_split_pass_v2,
    column_shard_linear_pass,
    gpipe_dp_split_pass,
    pipe_split,
    row_shard_linear_pass,
    split_with_split_nodes_pass,
    transformer_mlp_pass,
    uniform_split_pass,
)
from colossalai.pipeline.middleware import Topo
from colossalai.pipeline.middleware.adaptor import get_fx_topology
from colossalai.testing import spawn
from colossalai.utils import checkpoint
from tests.fx.models import build


class Mlp(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 8)
        self.recompute = recompute

    def block(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.up(x))))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        inner = checkpoint(self.block, False, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.last(inner + x) * scale


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
META = {"x": X.to("meta")}


def results(model: nn.Module, run: Callable[[], Tensor]) -> tuple[list[Tensor], int]:
    """The output, the gradients of the parameters, and how many tensors were kept for these."""
    kept = []
    torch.manual_seed(1)
    model.zero_grad()
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = run()
    out.sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())], len(kept)


def assert_runs_like(run: Callable[[], Tensor], model: nn.Module, want: Callable[[], Tensor]) -> None:
    got, expected = results(model, run)[0], results(model, want)[0]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected, strict=True))


def test_symbolic_trace_keeps_layers() -> None:
    model = Mlp()
    traced = symbolic_trace(model, concrete_args={"scale": 2.0}, meta_args=META)
    assert isinstance(traced, ColoGraphModule)
    nodes = [(n.op, n.name) for n in traced.graph.nodes]
    assert nodes[0] == ("placeholder", "x")
    assert [name for op, name in nodes if op == "call_module"] == ["up", "act", "down", "drop", "last"]
    assert [name for name, _ in traced.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert_runs_like(lambda: traced(X), model, lambda: model(X, 2.0))
    plain = symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))  # torch's own tracer
    assert plain(X).shape == (4, 8)
    with pytest.raises(ValueError, match=r"do not fit Mlp\.forward"):
        symbolic_trace(model, meta_args={"y": META["x"]})


def test_checkpointed_functions_are_recomputed() -> None:
    model = Mlp(recompute=True)
    plain = symbolic_trace(model, meta_args=META)
    traced = symbolic_trace(model, meta_args=META, trace_act_ckpt=True)
    labels = {n.name: n.meta["activation_checkpoint"] for n in traced.graph.nodes if n.op == "call_module"
              and "activation_checkpoint" in n.meta}  # fmt: skip
    assert labels == {"up": [0], "act": [0], "down": [0], "drop": [0]}
    want, count = results(model, lambda: model(X))
    got, recomputed = results(model, lambda: traced(X))
    _, kept = results(model, lambda: plain(X))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert recomputed == count < kept


def test_bias_additions_are_nodes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    x = torch.randn(2, 3, 4, 4)
    graph = ColoTracer(trace_act_ckpt=False, bias_addition_split=True).trace(model, meta_args={"input": x})
    added = [n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert len(added) == 2
    assert all(
        len(n.args) < 3 or n.args[2] is None for n in graph.nodes if "conv" in n.name or "linear" in n.name
    )
    traced = ColoGraphModule(model, graph)
    assert_runs_like(lambda: traced(x), model, lambda: model(x))
    symbolic_profile(traced, x)


def test_meta_trace_has_the_backward_pass() -> None:
    graph = meta_trace(Mlp(), None, X)
    targets = [n.target for n in graph.nodes]
    assert targets.count(torch.ops.aten.gelu_backward.default) == 1
    # three layers forward; backward two products each, without the gradient of the batch
    assert targets.count(torch.ops.aten.addmm.default) == 3
    assert targets.count(torch.ops.aten.mm.default) == 2 * 3 - 1
    assert len(graph.find_nodes(op="output")[0].args[0]) == 1 + 6


def test_shapes_and_costs_of_any_graph(capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp()
    traced = fx.symbolic_trace(nn.Sequential(model.up, model.act, model.down))
    shape_prop_pass(traced, X)
    assert [tuple(n.meta["val"].shape) for n in traced.graph.nodes if n.op == "call_module"] == [
        (4, 32),
        (4, 32),
        (4, 8),
    ]
    assert metainfo_trace(traced, X, verbose=True, unit="KB") is traced
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[-2:] == ["Kept", "KB"]
    assert len(printed) == 4
    op = next(n for n in traced.graph.nodes if n.name == "_0").meta["op"]
    assert op.forward.operations == 2 * 4 * 8 * 32
    assert op.backward.operations == 2 * 4 * 8 * 32  # of the weight
    found = MetaInfoProp(traced)
    assert found.run(X).shape == (4, 8)
    assert "4x32" in found.summary()
    with pytest.raises(ValueError, match="unit='TB' is none of"):
        metainfo_trace(traced, X, unit="TB")
    assert all(not isinstance(p, torch._subclasses.FakeTensor) for p in traced.parameters())


@pytest.mark.parametrize(
    ("cut", "stages"),
    [
        (balanced_split_pass, [["up", "act"], ["down", "drop", "last"]]),
        (balanced_split_pass_v2, None),
        (uniform_split_pass, None),
        (avgnode_split_pass, None),
        (avgcompute_split_pass, [["up", "act"], ["down", "drop", "last"]]),
        (gpipe_dp_split_pass, None),
    ],
)
def test_stages(cut: Callable[..., fx.GraphModule], stages: list[list[str]] | None) -> None:
    model = Mlp()
    traced = symbolic_trace(model, meta_args=META)
    symbolic_profile(traced, X)
    annotated = cut(traced, 2)
    assert len(annotated.graph.find_nodes(op="call_function", target=pipe_split)) == 1
    assert_runs_like(lambda: annotated(X), model, lambda: model(X))
    whole, parts = split_with_split_nodes_pass(annotated)
    assert_runs_like(lambda: whole(X), model, lambda: model(X))
    names = [[n.name for n in part.graph.nodes if n.op == "call_module"] for part in parts]
    assert [*names[0], *names[1]] == ["up", "act", "down", "drop", "last"]
    assert all(names)
    if stages is not None:
        weights = [sum(p.numel() for p in part.parameters()) for part in parts]
        assert max(weights) <= 0.7 * sum(weights)
    topo = get_fx_topology(whole)
    assert topo.get_mid_partition_ids() == [1, 2]
    assert topo.get_partition_by_id(2).get_input_partition_ids() == [1, 0]  # the batch is added in stage 2
    assert topo.get_partition_by_id(1).get_output_offsets(2) == [0]
    assert topo.get_output_partition().get_input_partition_ids() == [2]
    _, merged = split_with_split_nodes_pass(cut(_again(model), 2), merge_output=True)
    assert isinstance(merged[0](X), tuple)


def _again(model: nn.Module) -> fx.GraphModule:
    return symbolic_profile(symbolic_trace(model, meta_args=META), X)


def test_stages_of_gpt2_share_tied_weights() -> None:
    model, batch = build("gpt2")
    traced = symbolic_profile(symbolic_trace(model, meta_args=batch), *batch.values())
    whole, parts = split_with_split_nodes_pass(gpipe_dp_split_pass(traced, 3))
    torch.manual_seed(1)
    want = model(**batch).loss
    torch.manual_seed(1)
    assert torch.equal(whole(*batch.values())["loss"], want)
    assert parts[0].transformer.wte.weight is parts[-1].lm_head.weight is model.transformer.wte.weight
    topo = get_fx_topology(whole)
    assert "3 (part)" in str(topo)
    torch.manual_seed(1)
    results: dict[int, Any] = {0: tuple(batch.values())}
    for number, part in topo.get_mid_partitions().items():  # the stages, by the topology alone
        taken = [results[value.partition_id][value.offset] for value in part.get_input_vals()]
        out = parts[number - 1](*taken)
        results[number] = out if isinstance(out, tuple) else (out,)
    ends = [
        results[value.partition_id][value.offset] for value in topo.get_output_partition().get_input_vals()
    ]
    assert any(torch.equal(end, want) for end in ends if end.ndim == 0)
    assert max(len(value) for value in results.values()) > 1
    for number, part in topo.get_mid_partitions().items():
        for offset, value in enumerate(part.get_output_vals()):
            for taker, place in value.get():
                source = topo.get_partition_by_id(taker).get_input_vals()[place]
                assert (source.partition_id, source.offset) == (number, offset)


def test_what_runs_without_gradients_is_not_cut() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.layers[2](self.layers[1](self.layers[0](x)))
            return self.layers[3](x + y)

    model = Region()
    _, parts = split_with_split_nodes_pass(balanced_split_pass(symbolic_trace(model, meta_args=META), 2))
    parts[0](X)
    assert torch.is_grad_enabled()


def test_refusals_of_passes() -> None:
    traced = symbolic_trace(Mlp(), meta_args=META)
    with pytest.raises(ValueError, match=r"pp_size=0 stages cannot be cut from a graph of 7 parts"):
        balanced_split_pass(traced, 0)
    fresh = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"call metainfo_trace\(gm, \*args\) before"):
        avgcompute_split_pass(fresh, 1)
    with pytest.raises(ValueError, match="mode='time' is neither"):
        gpipe_dp_split_pass(symbolic_profile(traced, X), 2, mode="time")
    with pytest.raises(ValueError, match="is not a graph of stages: it computes add itself"):
        get_fx_topology(traced)
    with pytest.raises(KeyError, match="there is no part 3"):
        Topo().get_partition_by_id(3)


def test_compatibility() -> None:
    assert is_compatible_with_meta()

    @compatibility(is_backward_compatible=True)
    def function() -> int:
        return 1

    assert function() == 1
    assert function.is_backward_compatible


_PASSES: dict[str, Any] = {
    "column": column_shard_linear_pass,
    "row": row_shard_linear_pass,
    "pair": transformer_mlp_pass,
}


def _sharded(rank: int, world_size: int, port: int, kind: str) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    serial, model = Mlp().eval(), Mlp().eval()
    model.load_state_dict(serial.state_dict())
    traced = _PASSES[kind](symbolic_trace(model, meta_args=META))
    out = traced(X)
    whole = out.to_replicate() if hasattr(out, "to_replicate") else out
    torch.testing.assert_close(torch.as_tensor(whole.detach()).as_subclass(Tensor), serial(X).detach())
    whole.sum().backward()
    serial(X).sum().backward()
    cut = traced.up.weight
    dim = 1 if kind == "row" else 0
    shape = [32, 8]
    shape[dim] //= world_size
    assert list(cut.shape) == shape
    piece = serial.up.weight.grad.chunk(world_size, dim)[rank]
    torch.testing.assert_close(cut.grad.as_subclass(Tensor), piece)
    assert math.prod(traced.down.weight.shape) == 32 * 8 // world_size
    assert math.prod(traced.last.weight.shape) == 64 // (1 if kind == "pair" else world_size)


@pytest.mark.parametrize("kind", _PASSES)
def test_cut_layers(kind: str) -> None:
    spawn(_sharded, 2, kind=kind)
