"""One file: whole or not at all, nothing executed, and errors that name file and tensor."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from colossalai.checkpoint_io.files import state_file
from colossalai.checkpoint_io.utils import load_shard_state_dict, save_state_dict

FORMATS = pytest.mark.parametrize("use_safetensors", [False, True])


def _state() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {
        "a": weight,
        "tied": weight,
        "scalar": torch.tensor(3),
        "empty": torch.ones(0, 2),
        "half": torch.randn(2).bfloat16(),
        "transposed": torch.randn(3, 5).T,
        "window": torch.randn(100)[:2],
    }


@FORMATS
def test_a_state_dict_comes_back_as_it_was(use_safetensors: bool, tmp_path: Path) -> None:
    state = _state()
    path = tmp_path / "deep" / "er" / "weights"  # the name does not say the format
    save_state_dict(state, path, use_safetensors)
    loaded = load_shard_state_dict(path)
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
        assert loaded[name].dtype is value.dtype
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert [p.name for p in path.parent.iterdir()] == ["weights"]


@FORMATS
def test_a_window_into_a_large_tensor_does_not_drag_it_along(use_safetensors: bool, tmp_path: Path) -> None:
    save_state_dict({"window": torch.zeros(1_000_000)[:10]}, tmp_path / "x", use_safetensors)
    assert (tmp_path / "x").stat().st_size < 10_000


def test_other_tools_can_read_what_we_write(tmp_path: Path) -> None:
    state = _state()
    save_state_dict(state, tmp_path / "x.bin")
    assert torch.equal(torch.load(tmp_path / "x.bin", weights_only=True)["a"], state["a"])
    save_state_dict(state, tmp_path / "x.safetensors", use_safetensors=True)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        metadata = file.metadata()
        assert metadata.pop("colossalai.crc32")
        assert metadata == {"format": "pt", "tied": "a"}  # transformers insists on the format
        assert "tied" not in file.keys()  # noqa: SIM118
        assert torch.equal(file.get_tensor("a"), state["a"])


@FORMATS
def test_a_crash_while_writing_leaves_the_old_file(
    use_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    save_state_dict({"a": torch.ones(1)}, path, use_safetensors)

    def full(_: Path) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(state_file, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            save_state_dict({"a": torch.zeros(1)}, path, use_safetensors)
    assert load_shard_state_dict(path)["a"].item() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]  # and nothing half written


@FORMATS
def test_a_full_disk_is_named_with_the_file(
    use_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:  # what the libraries raise then
        raise SafetensorError("I/O error") if use_safetensors else RuntimeError("unexpected pos 960 vs 854")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("torch.save", full)
    with pytest.raises(
        OSError, match=r"weights cannot be written \(.* [KMGT]iB are free there\): (I/O|unexpected)"
    ):
        save_state_dict(_state(), tmp_path / "weights", use_safetensors)
    assert not list(tmp_path.iterdir())


@FORMATS
def test_files_are_readable_by_whom_the_umask_allows(use_safetensors: bool, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save_state_dict({"a": torch.ones(1)}, tmp_path / "x", use_safetensors)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_a_hostile_pickle_is_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Hostile()}, "zip.bin")
    Path("plain.bin").write_bytes(pickle.dumps({"a": _Hostile()}, protocol=2))
    for name in ("zip.bin", "plain.bin"):
        with pytest.raises(RuntimeError, match=f"{name} is not a checkpoint that can be read"):
            load_shard_state_dict(name)
    assert not Path("executed").exists()


@FORMATS
@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_a_file_cut_short_is_named(use_safetensors: bool, keep: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_state_dict({"a": torch.ones(100)}, path, use_safetensors)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RuntimeError, match=rf"{path} is not a checkpoint that can be read"):
        load_shard_state_dict(path)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"there is no checkpoint file {tmp_path}/no"):
        load_shard_state_dict(tmp_path / "no")
    torch.save([torch.ones(1)], tmp_path / "list")
    with pytest.raises(RuntimeError, match=r"list holds a list where a state dict was expected"):
        load_shard_state_dict(tmp_path / "list")


def test_what_a_format_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"cannot write extra to .*x: safetensors hold tensors only, and it is a dict"
    ):
        save_state_dict({"a": torch.ones(1), "extra": {}}, tmp_path / "x", use_safetensors=True)
    with pytest.raises(ValueError, match=r"cannot write a.b to .*x: it is on the meta device"):
        save_state_dict({"a": {"b": torch.ones(1, device="meta")}}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
