"""A checkpoint that does not fit: the model stays as it was where that can be known, and the error leads the
right way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.checkpoint_io import GeneralCheckpointIO
from colossalai.checkpoint_io.files.state_file import save_state_dict, survey_file

IO = GeneralCheckpointIO()
FORMATS = pytest.mark.parametrize("use_safetensors", [False, True])


def _net(out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, out))


def _loading_changes(model: nn.Module, path: Path, refusal: str) -> bool:
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=refusal):
        IO.load_model(model, path)
    return not all(map(torch.equal, before, model.parameters()))


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _emptied(path: Path) -> None:
    save_state_dict({}, path, path.suffix == ".safetensors")


@FORMATS
@pytest.mark.parametrize(
    ("break_it", "refusal"),
    [(_cut_short, "cannot|can be read"), (_emptied, "the index says that 2.bias is in")],
)
def test_one_bad_shard_leaves_the_model_as_it_was(
    break_it: Callable[[Path], None], refusal: str, use_safetensors: bool, tmp_path: Path
) -> None:
    IO.save_model(_net(), tmp_path, shard=True, size_per_shard=1e-6, use_safetensors=use_safetensors)
    shards = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")
    assert len(shards) == 4
    break_it(shards[-1])
    assert not _loading_changes(_net(), tmp_path, refusal)


@FORMATS
@pytest.mark.parametrize("shard", [False, True])
def test_so_does_a_shape_that_does_not_fit(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    IO.save_model(_net(3), tmp_path / "m", shard, size_per_shard=1e-6, use_safetensors=use_safetensors)
    refusal = (
        r"m.* does not fit the model: .*size mismatch for 2\.weight: \(3, 32\) in the file, \(2, 32\) in the"
    )
    assert not _loading_changes(_net(), tmp_path / "m", refusal)


class _Takes(nn.Linear):
    """A module that changes what is loaded into it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"][:2]


def test_modules_may_change_what_is_loaded_and_numbers_may_be_rows(tmp_path: Path) -> None:
    IO.save_model(nn.Linear(2, 2), tmp_path / "x")
    save_state_dict({"weight": torch.ones(4, 2), "bias": torch.ones(2)}, tmp_path / "long")
    model = _Takes()
    IO.load_model(model, tmp_path / "long")
    assert torch.equal(model.weight, torch.ones(2, 2))
    number = nn.Module()
    number.scale = nn.Parameter(torch.zeros(()))
    save_state_dict({"scale": torch.ones(1)}, tmp_path / "number")
    IO.load_model(number, tmp_path / "number")
    assert number.scale == 1


@pytest.mark.parametrize("in_file", [True, False])
def test_names_that_differ_by_a_prefix(in_file: bool, tmp_path: Path) -> None:
    plain, inside = _net(), nn.ModuleDict({"module": _net()})
    saved, own = (inside, plain) if in_file else (plain, inside)
    IO.save_model(saved, tmp_path / "m")
    side = "file" if in_file else "model"
    with pytest.raises(
        RuntimeError, match=rf"only in that those of the {side} begin with 'module\.'"
    ) as error:
        IO.load_model(own, tmp_path / "m")
    assert "strict" not in str(error.value)


def test_a_load_that_loads_nothing_is_reported(tmp_path: Path) -> None:
    IO.save_model(nn.Linear(2, 2), tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"They have no name in common$"):
        IO.load_model(_net(), tmp_path / "m")
    with pytest.warns(
        UserWarning, match=r"nothing was loaded from .*/m: none of its 2 names is one of the 4 of Seq"
    ):
        IO.load_model(_net(), tmp_path / "m", strict=False)
    IO.save_model(nn.Sequential(nn.Linear(8, 32)), tmp_path / "part")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IO.load_model(_net(), tmp_path / "part", strict=False)


@FORMATS
def test_a_survey_has_all_names_and_shapes(use_safetensors: bool, tmp_path: Path) -> None:
    weight = torch.ones(3, 2)
    save_state_dict({"a": weight, "tied": weight, "b": torch.ones(())}, tmp_path / "x", use_safetensors)
    survey: dict[str, Tensor] = survey_file(tmp_path / "x")
    assert {name: tuple(value.shape) for name, value in survey.items()} == {
        "a": (3, 2),
        "tied": (3, 2),
        "b": (),
    }
    torch.save({"a": weight}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert survey_file(tmp_path / "old")["a"].shape == (3, 2)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint file"):
        survey_file(tmp_path / "none")
