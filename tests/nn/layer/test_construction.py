"""How layers are made: names and signatures, roles, sizes that do not fit, conversion of native modules,
copies.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, collectives, count_communication, full_shape, placement
from colossalai.nn.modes import mode_1d, mode_2d, mode_3d, set_stream_position, stream_position
from colossalai.testing import fake_world, spawn
from tests.nn.layer.world import close, compare, start, whole


def parameters(call: object) -> list[str]:
    return [
        name
        for name, p in inspect.signature(call).parameters.items()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


WI, BI = "weight_initializer", "bias_initializer"
LINEAR = ["in_features", "out_features", "bias", "dtype"]
CLASSIFIER = ["in_features", "num_classes", "weight", "bias", "dtype", WI, BI]
EMBEDDING = ["num_embeddings", "embedding_dim", "padding_idx", "dtype", WI]
PATCHES = ["img_size", "patch_size", "in_chans", "embed_size", "dtype", "flatten", WI, BI]
SUFFIXES = ("1D", "2D", "2p5D", "3D")
DOCUMENTED = {
    "Linear": [*LINEAR, WI, BI],
    "Linear1D": [*LINEAR, "gather_output", "skip_bias_add", WI, BI],
    "Linear1D_Col": [*LINEAR, "gather_output", "skip_bias_add", WI, BI],
    "Linear1D_Row": [*LINEAR, "parallel_input", "skip_bias_add", WI, BI, "stream_chunk_num"],
    **{f"Linear{s}": [*LINEAR, "skip_bias_add", WI, BI] for s in ("2D", "2p5D", "3D")},
    "Classifier": [*CLASSIFIER, "vocab_parallel_limit"],
    "Embedding": [*EMBEDDING, "vocab_parallel_limit"],
    "PatchEmbedding": [*PATCHES, "position_embed_initializer"],
    "LayerNorm": ["normalized_shape", "eps", "bias", "dtype"],
    "Dropout": ["p", "inplace"],
    "Dropout1D": ["p", "inplace"],
    **{f"Classifier{s}": CLASSIFIER for s in SUFFIXES},
    **{f"VocabParallelClassifier{s}": CLASSIFIER for s in SUFFIXES},
    "VocabParallelClassifier1D": [*CLASSIFIER[:5], "gather_output", WI, BI],
    **{f"{kind}{s}": EMBEDDING for kind in ("Embedding", "VocabParallelEmbedding") for s in SUFFIXES},
    **{f"LayerNorm{s}": ["normalized_shape", "eps", "bias", "dtype"] for s in SUFFIXES},
    "PatchEmbedding1D": [*PATCHES, "position_embed_initializer"],
    # in this order in the documents
    **{
        f"PatchEmbedding{s}": [*PATCHES[:4], "flatten", "dtype", WI, BI, "position_embed_initializer"]
        for s in SUFFIXES[1:]
    },
}
SUFFIXED = {
    kind: [f"{kind}{s}" for s in SUFFIXES]
    for kind in (
        "Linear",
        "Classifier",
        "VocabParallelClassifier",
        "Embedding",
        "VocabParallelEmbedding",
        "LayerNorm",
        "PatchEmbedding",
    )
}


def test_documented_names_and_signatures() -> None:
    for name, expected in DOCUMENTED.items():
        assert parameters(getattr(col_nn, name)) == expected, name
    for kind, names in SUFFIXED.items():
        for name in names:
            assert issubclass(getattr(col_nn, name), getattr(col_nn, kind)), name
            assert pickle.loads(pickle.dumps(getattr(col_nn, name))) is getattr(col_nn, name)
    assert inspect.signature(col_nn.LayerNorm3D).parameters["eps"].default == 1e-12
    assert inspect.signature(col_nn.LayerNorm2D).parameters["eps"].default == 1e-5
    assert col_nn.ACT2FN.keys() == {"gelu", "relu", "swish"}


def test_a_class_of_another_mode_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"Linear2D needs the tensor mode '2d', but the mode is None; launch with parallel=dict\(",
    ):
        col_nn.Linear2D(4, 4)
    with pytest.raises(ValueError, match="Linear is cut into 2 pieces and needs a mesh: launch first"):
        col_nn.Linear(4, 4, tp=mode_1d(2))
    with fake_world(0, 4):
        mesh = Mesh({"tp": 4})
        with pytest.raises(ValueError, match="the mode has axis 'tp' of size 2, the mesh has 4"):
            col_nn.Linear(4, 4, tp=mode_1d(2), mesh=mesh)


def test_sizes_that_do_not_divide() -> None:
    with fake_world(0, 8):
        mesh, tp = Mesh({"l": 2, "j": 2, "i": 2}), mode_3d(2)
        with pytest.raises(
            ValueError,
            match="Linear: out_features=102 is cut by j=2 x i=2 and j=2 and must be a multiple of 4;"
            " the nearest valid "
            "sizes are 100 and 104",
        ):
            col_nn.Linear(8, 102, role="expand", tp=tp, mesh=mesh)
        with pytest.raises(
            ValueError, match=r"out_features=18 .* in each of 3 blocks and must be a multiple of 12"
        ):
            col_nn.Linear(8, 18, role="expand", fused=3, tp=tp, mesh=mesh)
        with pytest.raises(ValueError, match=r"Linear3D: in_features=1 .* the nearest valid sizes are 2"):
            col_nn.Linear3D(1, 4, tp=tp, mesh=mesh)
        with pytest.raises(ValueError, match="LayerNorm: normalized_shape=7 is cut by l=2"):
            col_nn.LayerNorm(7, tp=tp, mesh=mesh)
        with pytest.raises(ValueError, match="Embedding: embedding_dim=6 is cut by l=2 and l=2 x i=2"):
            col_nn.Embedding(5000, 6, tp=tp, mesh=mesh)
        with pytest.raises(ValueError, match="Classifier: in_features=5 is cut by l=2"):
            col_nn.Classifier(5, 10, tp=tp, mesh=mesh)
        with pytest.raises(ValueError, match="PatchEmbedding: embed_size=5 is cut by l=2"):
            col_nn.PatchEmbedding(4, 2, 3, 5, tp=tp, mesh=mesh)
        with pytest.raises(
            ValueError, match=r"a batch of 6 rows is shared by i=2 x j=2 = 4 ranks; .* 4 and 8"
        ):
            col_nn.partition_batch(torch.zeros(6, 2), tp=tp, mesh=mesh)
        assert col_nn.partition_batch([torch.zeros(8, 2), {"a": 1}], tp=tp, mesh=mesh)[0].shape == (2, 2)

    with fake_world(0, 4):  # the stream of 1D is whole, but its tables and heads are not
        here = {"mesh": Mesh({"tp": 4}), "tp": mode_1d(4)}
        with pytest.raises(ValueError, match=r"Embedding1D: embedding_dim=6 is cut by tp=4 .* 4 and 8"):
            col_nn.Embedding1D(10, 6, **here)
        with pytest.raises(ValueError, match=r"Classifier1D: in_features=6 is cut by tp=4 .* 4 and 8"):
            col_nn.Classifier1D(6, 10, **here)


def test_other_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="role is 'expand' or 'contract', got 'up'"):
        col_nn.Linear(4, 4, role="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding_idx=9 is not one of the 4 entries"):
        col_nn.Embedding(4, 4, padding_idx=9)
    assert col_nn.Embedding(4, 4, sparse=False, norm_type=1.0).num_embeddings == 4
    with pytest.raises(ValueError, match=r"Embedding: max_norm=1.0 is not supported, only max_norm=None"):
        col_nn.Embedding(4, 4, max_norm=1.0)
    with pytest.raises(TypeError, match="Embedding got an unexpected keyword argument 'vocabulary'"):
        col_nn.Embedding(4, 4, vocabulary=1)
    with pytest.raises(
        ValueError, match=r"normalizes the last dim, its features; got normalized_shape=\(2, 3\)"
    ):
        col_nn.LayerNorm((2, 3))
    with pytest.raises(ValueError, match="p is a probability, got 2"):
        col_nn.Dropout(2)
    with pytest.raises(ValueError, match="drop_path must be at least 0 and less than 1, got 1"):
        col_nn.DropPath(1.0)
    with pytest.raises(ValueError, match="img_size=5 is not a multiple of patch_size=2"):
        col_nn.PatchEmbedding(5, 2, 3, 4)
    with pytest.raises(
        ValueError, match=r"a tied weight is a parameter .* = \(9, 4\), got a Parameter of shape"
    ):
        col_nn.Classifier(4, 9, weight=nn.Parameter(torch.zeros(8, 4)))
    with pytest.raises(ValueError, match="WrappedDropout: p is a probability, got -1"):
        col_nn.WrappedDropout(-1)
    with pytest.raises(
        TypeError, match=r"reduction is True \(the mean\) or False \(each sample\), got 'mean'"
    ):
        col_nn.CrossEntropyLoss("mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="7 is not divisible by 2"):
        col_nn.divide(7, 2)
    with pytest.raises(TypeError, match="must define _forward"):
        col_nn.CheckpointModule()(torch.zeros(1))
    with pytest.raises(RuntimeError, match="split_batch_2d needs a job launched in tensor mode '2d'"):
        col_nn.split_batch_2d(torch.zeros(2))


def test_roles_alternate_and_an_odd_count_is_loud() -> None:
    with fake_world(0, 2):
        mesh, tp = Mesh({"tp": 2}), mode_1d(2)
        here = {"tp": tp, "mesh": mesh}
        assert [col_nn.Linear(4, 4, **here).role for _ in range(4)] == ["expand", "contract"] * 2
        assert col_nn.Linear(4, 4, role="contract", **here).role == "contract"
        with pytest.raises(ValueError, match="stream_chunk_num is at least 1, got 0"):
            col_nn.Linear1D_Row(4, 4, stream_chunk_num=0, **here)
        assert stream_position(mesh) == "hidden"  # a role that is given does not move the cursor
        assert col_nn.Linear1D(4, 4, gather_output=True, **here).role == "expand"
        assert stream_position(mesh) == "hidden"  # whole features are 1D's hidden layout
        for build in (lambda: col_nn.LayerNorm(4, **here), lambda: col_nn.Embedding(4, 4, **here)):
            col_nn.Linear(4, 4, **here)
            assert col_nn.Dropout(0.1, **here).layout == tp.inner
            with pytest.raises(
                ValueError, match="left the stream in its inner layout: Linears come in pairs"
            ):
                build()
            assert stream_position(mesh) == "hidden"  # for the next model
        col_nn.Linear(4, 4, **here)
        set_stream_position("hidden", mesh)
        col_nn.LayerNorm(4, **here)
    with fake_world(0, 4):  # in 2D there is one layout, so that any number of Linears is fine
        mesh = Mesh({"row": 2, "col": 2})
        col_nn.Linear(4, 4, tp=mode_2d(2), mesh=mesh)
        col_nn.LayerNorm(4, tp=mode_2d(2), mesh=mesh)


class Conv1D(nn.Module):
    """As Hugging Face's: the weight is stored (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _from_native(rank: int, world_size: int, port: int, name: str) -> None:
    tp, mesh = start(rank, world_size, port, name)
    here = {"tp": tp, "mesh": mesh}
    x = torch.randn(8, 4, 24)
    qkv = Conv1D(72, 24)
    layer = col_nn.Linear.from_native(qkv, "expand", fused=3, **here)
    close(whole(layer.weight, layer.weight, mesh), qkv.weight, "a Conv1D keeps its order")
    compare(
        lambda x: layer(x).chunk(3, -1)[1], lambda x: qkv(x).chunk(3, -1)[1], x, tp.hidden, tp.inner, mesh
    )
    linear = nn.Linear(24, 24, bias=False).eval().requires_grad_(False)
    layer = col_nn.Linear.from_native(linear, "contract", **here)
    assert (layer.training, layer.weight.requires_grad, layer.bias) == (False, False, None)
    close(whole(layer.weight, layer.weight, mesh), linear.weight, "weight")
    table = nn.Embedding(31, 24, padding_idx=3)
    mine = col_nn.Embedding.from_native(table, vocab_parallel=True, **here)
    close(whole(mine.weight, mine.weight, mesh), table.weight, "table")
    head = nn.Linear(24, 31, bias=False)
    head.weight = table.weight
    tied = col_nn.Classifier.from_native(head, weight=mine.weight, **here)
    assert tied.weight is mine.weight
    compare(tied, head, x, tp.hidden, tied.logits, mesh, uneven=True)
    norm = nn.LayerNorm(24, eps=1e-3).to(torch.bfloat16)
    assert col_nn.LayerNorm.from_native(norm, **here).weight.dtype == torch.bfloat16
    with torch.device("meta"):
        empty = nn.Linear(24, 48)
    layer = col_nn.Linear.from_native(empty, "expand", **here)
    assert layer.weight.is_meta
    assert tuple(full_shape(layer.weight)) == (48, 24)
    assert placement(layer.weight).sharded
    _copies(layer, tied, mesh)


def _copies(layer: nn.Module, tied: nn.Module, mesh: Mesh) -> None:
    twin = copy.deepcopy(tied)
    assert twin.mesh is mesh
    assert placement(twin.weight) == placement(tied.weight)
    again = pickle.loads(pickle.dumps(tied))
    assert again.mesh is mesh
    assert torch.equal(again.weight, tied.weight)
    for bad in (replace(layer.tp, axes={"tp": 3}),):
        assert bad != layer.tp


@pytest.mark.parametrize("name", ["1d", "2d", "3d"])
def test_native_modules_become_pieces(name: str) -> None:
    spawn(_from_native, {"1d": 2, "2d": 4, "3d": 8}[name], name=name)


def test_a_pickled_mesh_needs_its_launch() -> None:
    with fake_world(0, 2):
        data = pickle.dumps(Mesh({"tp": 2}))
    with pytest.raises(
        RuntimeError, match=r"lies on a mesh \(tp=2\) on cpu, and this process has no such mesh"
    ):
        pickle.loads(data)


def _same_bits(rank: int, world_size: int, port: int) -> None:
    """A model under every config has the bits of the serial one, also after a user's own initializer."""
    expected: dict[str, Tensor] = {}
    configs = [
        None,
        {"size": 4, "mode": "1d"},
        {"size": 4, "mode": "2d"},
        {"size": 4, "mode": "2.5d", "depth": 1},
    ]
    for tensor in configs:
        config = {} if tensor is None else {"parallel": {"tensor": tensor}}
        colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
        torch.manual_seed(11)
        layers = [
            col_nn.Embedding(5001, 8),
            col_nn.Linear(8, 16, weight_initializer=col_nn.init.trunc_normal_(std=0.02)),
            col_nn.Linear(
                16, 8, weight_initializer=lambda t, fan_in, fan_out: nn.init.orthogonal_(t, fan_out / 8)
            ),
            col_nn.PatchEmbedding(4, 2, 3, 8, position_embed_initializer=col_nn.init.normal_()),
            col_nn.Classifier(8, 5001, weight_initializer=col_nn.init.lecun_normal_()),
        ]
        for i, layer in enumerate(layers):
            for name, value in layer.global_state_dict(f"{i}.").items():
                assert torch.equal(value, expected.setdefault(name, value)), (tensor, name)
        gpc.destroy()
    assert len(expected) == 11
    assert expected["1.weight"].abs().max() <= 2
    assert not dist.is_initialized()


def test_initial_values_do_not_depend_on_the_config() -> None:
    spawn(_same_bits, 4)


def _streams(rank: int, world_size: int, port: int) -> None:
    colossalai.launch(
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
        rank,
        world_size,
        "127.0.0.1",
        port,
        "gloo",
        verbose=False,
    )
    torch.manual_seed(0)
    row = col_nn.Linear1D_Row(8, 6, stream_chunk_num=4)
    x = torch.randn(3, 5, 4)
    with count_communication() as log, torch.no_grad():
        y = row(x)
    assert log.calls("all_reduce") == 3  # 6 outputs in parts of 2
    torch.testing.assert_close(y, row(x).detach())
    # masks: alike where the tensor is whole, different where it is cut
    ones = torch.ones(50)
    alike = col_nn.Dropout(0.5, at="hidden"), col_nn.WrappedDropout(0.5, mode=ParallelMode.DATA)
    other = col_nn.Dropout(0.5, at="inner"), col_nn.WrappedDropout(0.5, mode=ParallelMode.TENSOR)
    for layers, expected in ((alike, True), (other, False)):
        for layer in layers:
            masks = collectives.all_gather(layer(ones), gpc.mesh, "tp", 0).view(2, 50)
            assert torch.equal(masks[0], masks[1]) == expected, layer
    path = col_nn.WrappedDropPath(0.5, mode=ParallelMode.TENSOR)
    paths = collectives.all_gather(path(torch.ones(50, 1)), gpc.mesh, "tp", 0).view(2, 50)
    assert not torch.equal(paths[0], paths[1])
    paths = collectives.all_gather(col_nn.DropPath(0.5)(torch.ones(50, 1)), gpc.mesh, "tp", 0).view(2, 50)
    assert torch.equal(paths[0], paths[1])
    assert 0 < int((paths[0] == 0).sum()) < 50


def test_random_streams_and_streamed_rows() -> None:
    spawn(_streams, 2)
