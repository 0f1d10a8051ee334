"""Names, the index, and folders of shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.amp import AMP_TYPE, convert_to_amp
from colossalai.checkpoint_io import CheckpointIndexFile, GeneralCheckpointIO
from colossalai.checkpoint_io.files import sharding
from colossalai.checkpoint_io.files.io import _write_optimizer_shards
from colossalai.checkpoint_io.files.sharding import FileKind, find_checkpoint
from colossalai.checkpoint_io.utils import (
    add_variant,
    calculate_tensor_size,
    get_base_filenames,
    get_shard_filename,
    has_index_file,
    is_safetensors_available,
    shard_checkpoint,
)
from colossalai.testing import check_state_dict_equal

KB = 1 / 1024  # in MB


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16))


def test_names() -> None:
    assert add_variant("pytorch_model.bin") == add_variant("pytorch_model.bin", "") == "pytorch_model.bin"
    assert add_variant("pytorch_model.bin", "fp16") == "pytorch_model.fp16.bin"
    assert get_base_filenames() == ("pytorch_model.bin", "pytorch_model.bin.index.json")
    assert get_base_filenames(None, True) == ("model.safetensors", "model.safetensors.index.json")
    assert get_base_filenames("v") == ("pytorch_model.v.bin", "pytorch_model.bin.index.v.json")
    assert get_shard_filename("pytorch_model.bin", 0) == "pytorch_model-00001.bin"
    with pytest.raises(ValueError, match=r"must not hold a path separator; got '../x'"):
        add_variant("a.bin", "../x")


def test_shards_are_filled_in_order_up_to_their_size() -> None:
    state: dict[str, Any] = {f"{i}": torch.ones(256) for i in range(5)}  # 1 KB each
    assert calculate_tensor_size(state["0"]) == KB
    assert [list(shard) for shard, _ in shard_checkpoint(state, 2 * KB)] == [["0", "1"], ["2", "3"], ["4"]]
    assert [size for _, size in shard_checkpoint(state, 2 * KB)] == [2 * KB, 2 * KB, KB]
    state["2"] = torch.ones(4096)  # larger than a shard
    assert [list(shard) for shard, _ in shard_checkpoint(state, 2 * KB)] == [["0", "1"], ["2"], ["3", "4"]]
    state["4"] = state["0"]  # tied: together, and counted once
    assert [list(shard) for shard, _ in shard_checkpoint(state, 2 * KB)] == [["0", "4", "1"], ["2"], ["3"]]
    nested = {0: {"m": torch.ones(256), "v": torch.ones(256)}, 1: {"m": torch.ones(256), "note": "x"}}
    assert [list(shard) for shard, _ in shard_checkpoint(nested, 2 * KB)] == [[0], [1]]
    assert list(shard_checkpoint({})) == []


@pytest.mark.parametrize(
    ("use_safetensors", "stem", "suffix"),
    [(False, "pytorch_model", "bin"), (True, "model", "safetensors")],
)
@pytest.mark.parametrize("variant", [None, "v"])
def test_a_folder_has_the_layout_of_hugging_face(
    use_safetensors: bool, stem: str, suffix: str, variant: str | None, tmp_path: Path
) -> None:
    model = _model()
    GeneralCheckpointIO().save_model(model, tmp_path, True, True, variant, 1.5 * KB, use_safetensors)
    mark = f".{variant}" if variant else ""
    index = json.loads((tmp_path / f"{stem}.{suffix}.index{mark}.json").read_text())
    assert index["metadata"] == {"total_size": sum(v.nbytes for v in model.state_dict().values())}
    assert list(index["weight_map"]) == list(model.state_dict()) or use_safetensors
    assert index["weight_map"].keys() == model.state_dict().keys()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"{stem}{mark}-{i:05d}.{suffix}" for i in range(1, len(shards) + 1)]
    assert len(shards) > 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*shards, f"{stem}.{suffix}.index{mark}.json"]
    )


def test_tied_weights_in_a_folder_of_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    io = GeneralCheckpointIO()
    io.save_model(model, tmp_path, True, size_per_shard=KB, use_safetensors=True)
    index = CheckpointIndexFile.from_file(tmp_path / "model.safetensors.index.json")
    assert "1.weight" not in index.get_all_param_names()  # transformers expects of a file what its index says
    untied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    io.load_model(untied, tmp_path)
    assert torch.equal(untied[0].weight, model[0].weight)
    assert torch.equal(untied[1].weight, model[0].weight)


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_saving_over_a_checkpoint_leaves_one_complete_checkpoint(
    use_safetensors: bool, tmp_path: Path
) -> None:
    io = GeneralCheckpointIO()
    counts = []
    (tmp_path / "config.json").write_text("{}")  # somebody else's
    for size in (KB, 1.5 * KB, KB, 100.0):
        model, other = _model(), _model()
        io.save_model(model, tmp_path, True, size_per_shard=size, use_safetensors=use_safetensors)
        io.load_model(other, tmp_path)
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
        counts.append(len(list(tmp_path.iterdir())))
    assert counts[0] == counts[2] > counts[3] == 3


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(5))  # four shards, then the index
@pytest.mark.parametrize("how", [OSError, _Killed])
def test_a_save_that_breaks_off_leaves_the_previous_checkpoint(
    moment: int, how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = GeneralCheckpointIO()
    model, other = _model(), _model()
    io.save_model(model, tmp_path, True, size_per_shard=KB)
    files = sorted(p.name for p in tmp_path.iterdir())
    written = []

    def break_off(real: Any) -> Any:
        def write(*args: Any) -> None:
            if len(written) == moment:
                raise how("the disk is full")
            written.append(args)
            real(*args)

        return write

    monkeypatch.setattr(sharding, "save_state_dict", break_off(sharding.save_state_dict))
    monkeypatch.setattr(CheckpointIndexFile, "export", break_off(CheckpointIndexFile.export))
    if how is _Killed:  # no time to clean up
        monkeypatch.setattr(sharding.ShardedWriter, "__exit__", lambda *_: None)
    with pytest.raises(how, match="the disk is full"):
        io.save_model(_model(), tmp_path, True, size_per_shard=KB)
    io.load_model(other, tmp_path)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    if how is OSError:
        assert sorted(p.name for p in tmp_path.iterdir()) == files
    monkeypatch.undo()
    io.save_model(other, tmp_path, True, size_per_shard=KB)  # goes over what was left
    io.load_model(_model(), tmp_path)


def test_optimizer_folders_are_replaced_as_one(tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    for lr in (0.1, 0.2, 0.3):
        model = _model()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        io.save_optimizer(optimizer, tmp_path, True, size_per_shard=KB)
        other = torch.optim.Adam(_model().parameters(), lr=1)
        io.load_optimizer(other, tmp_path)
        assert other.param_groups[0]["lr"] == lr
        for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)
        names = [p.name for p in tmp_path.iterdir()]
        assert sum("group" in name for name in names) == 1
        assert "pytorch_optim.bin.index.json" in names
    assert "pytorch_optim_group.bin" in names
    assert "pytorch_optim-00001.bin" in names


def test_a_model_and_an_optimizer_share_a_folder(tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    io.save_model(model, tmp_path, True)
    io.save_optimizer(optimizer, tmp_path, True, prefix="p")
    io.load_model(_model(), tmp_path)
    io.load_optimizer(torch.optim.SGD(_model().parameters(), lr=0.1), tmp_path)
    with pytest.raises(RuntimeError, match=r"pytorch_model.bin.index.json is not the index of an optimizer"):
        io.load_optimizer(optimizer, tmp_path / "pytorch_model.bin.index.json")


def test_a_folder_is_searched_for_what_hugging_face_puts_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        find_checkpoint(tmp_path / "no", FileKind.MODEL)
    with pytest.raises(
        FileNotFoundError, match=r"holds no model checkpoint: no pytorch_model.bin\[.index.json\] or"
    ):
        find_checkpoint(tmp_path, FileKind.MODEL)
    for name in ("config.json", "pytorch_optim.bin", "model.fp16.safetensors"):
        (tmp_path / name).touch()
    assert find_checkpoint(tmp_path, FileKind.MODEL).name == "model.fp16.safetensors"
    assert find_checkpoint(tmp_path, FileKind.OPTIMIZER).name == "pytorch_optim.bin"
    assert has_index_file(tmp_path) == (False, None)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match=r"several checkpoints \(model.fp16.safetensors, pytorch_model.bin\); pass"
    ):
        find_checkpoint(tmp_path, FileKind.MODEL)
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    assert has_index_file(tmp_path) == has_index_file(index) == (True, index)
    assert find_checkpoint(tmp_path, FileKind.MODEL) == index


def test_the_index_file() -> None:
    index = CheckpointIndexFile()
    index.append_weight_map("a", "1.bin")
    with pytest.raises(RuntimeError, match="this index has no folder yet"):
        index.get_checkpoint_filenames()
    index = CheckpointIndexFile("folder")
    index.append_weight_map("a", "1.bin")
    index.append_weight_map("b", "1.bin")
    index.append_meta_data("total_size", 3)
    assert index.get_checkpoint_file("b") == "1.bin"
    assert index.get_all_param_names() == ["a", "b"]
    assert index.get_checkpoint_filenames() == index.get_checkpoint_fileanames() == ["folder/1.bin"]
    with pytest.raises(KeyError, match="the index of folder has no tensor 'c'"):
        index.get_checkpoint_file("c")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list where an object was expected"),
        ("{}", "is not the index of a sharded checkpoint: it has no object 'weight_map'"),
        (
            '{"weight_map": {}, "metadata": 3}',
            "is not the index of a sharded checkpoint: its 'metadata' is not an object but 3",
        ),
        ('{"weight_map": {"a": "../../etc/x"}}', "says that a is in '../../etc/x', which is not the name"),
        ('{"weight_map": {"a": 3}}', "says that a is in 3, which is not the name"),
        ('{"weight_map": {}, "metadata": {"param_groups": "/x"}}', "says that param_groups is in '/x'"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(content)
    with pytest.raises(RuntimeError, match=re.escape(str(path)) + " " + text):
        GeneralCheckpointIO().load_model(_model(), tmp_path)
    GeneralCheckpointIO().save_model(
        _model(), tmp_path, True
    )  # such an index is no reason to lose a new checkpoint
    GeneralCheckpointIO().load_model(_model(), tmp_path)


def test_swapped_and_missing_shards_are_noticed(tmp_path: Path) -> None:
    io = GeneralCheckpointIO()
    io.save_model(_model(), tmp_path, True, size_per_shard=KB)
    first, second = tmp_path / "pytorch_model-00001.bin", tmp_path / "pytorch_model-00002.bin"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(RuntimeError, match=rf"the index says that 0.weight is in {first}, but it is not"):
        io.load_model(_model(), tmp_path)
    first.write_bytes(content)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=rf"there is no checkpoint file {second}"):
        io.load_model(_model(), tmp_path)


def test_masters_are_spread_over_the_shards(tmp_path: Path) -> None:
    """All fp32 masters in one file would be as large as the model, however small the shards are."""
    for make in (torch.optim.Adam, torch.optim.SGD):  # with states of its own, and without
        folder = tmp_path / make.__name__
        model, optimizer = _naive(make)
        size = max(p.numel() for p in optimizer.parameters()) * 4 / sharding.MB
        io = GeneralCheckpointIO()
        io.save_optimizer(optimizer, folder, shard=True, size_per_shard=size)
        index = CheckpointIndexFile.from_file(folder / "pytorch_optim.bin.index.json")
        groups = torch.load(folder / index.param_groups_file(), weights_only=True)  # type: ignore[operator]
        assert "master_weights" not in groups
        shards = [torch.load(f, weights_only=True) for f in index.get_checkpoint_filenames()]
        assert len(shards) >= 3
        held = {number for shard in shards for number, state in shard.items() if "master_weights" in state}
        assert held == set(range(len(optimizer.parameters())))
        total = sum(p.numel() for p in optimizer.parameters()) * 4
        assert index.metadata["total_size"] >= total * (3 if make is torch.optim.Adam else 1)
        other_model, other = _naive(make, seed=1)
        io.load_optimizer(other, folder)
        other_model.load_state_dict(model.state_dict())
        _same(other.state_dict(), optimizer.state_dict())


def test_masters_in_the_groups_file_still_load(tmp_path: Path) -> None:
    """Checkpoints of before had them there."""
    model, optimizer = _naive(torch.optim.Adam)
    groups = optimizer.state_dict()
    _write_optimizer_shards(shard_checkpoint(groups.pop("state"), 1e-3), groups, tmp_path)
    other_model, other = _naive(torch.optim.Adam, seed=1)
    GeneralCheckpointIO().load_optimizer(other, tmp_path)
    other_model.load_state_dict(model.state_dict())
    _same(other.state_dict(), optimizer.state_dict())


def _naive(make: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    amp_model, optimizer, _ = convert_to_amp(
        model, make(model.parameters(), lr=0.1), None, AMP_TYPE.NAIVE, {"initial_scale": 2**8}
    )
    for _ in range(2):
        optimizer.zero_grad()  # type: ignore[union-attr]
        optimizer.backward(amp_model(torch.ones(4, 8)).square().mean())  # type: ignore[union-attr]
        optimizer.step()  # type: ignore[union-attr]
    return model, optimizer


def _same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    check_state_dict_equal(a, b)


def test_an_index_of_tensors_in_pieces_is_told() -> None:
    index = CheckpointIndexFile("somewhere")
    index.append_weight_map("weight", "model-00001.safetensors")
    assert not index.contains_dtensor()
    index.assert_no_dtensor_checkpoint()
    index.append_weight_map("table", "model-00002.*.safetensors")
    assert index.contains_dtensor()
    with pytest.raises(ValueError, match="somewhere has tensors in pieces, one file for each rank"):
        index.assert_no_dtensor_checkpoint()
    assert is_safetensors_available()
