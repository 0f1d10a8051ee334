"""``colossalai ckpt``: every form that the library writes can be looked at, verified and converted."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.checkpoint_io.files.state_file import load_shard_state_dict
from colossalai.checkpoint_io.runs.manifest import read_manifest
from colossalai.cli.app import cli
from colossalai.testing import assert_equal
from tests.cli.checkpoints import FORMS, build, trained, write_all


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return root, write_all(root)


@pytest.fixture
def root(written: tuple[Path, dict[str, Tensor]]) -> Path:
    return written[0]


@pytest.fixture
def weights(written: tuple[Path, dict[str, Tensor]]) -> dict[str, Tensor]:
    return written[1]


def ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["ckpt", *map(str, arguments)])


def done(*arguments: object) -> str:
    result = ckpt(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    result = ckpt(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


# show


@pytest.mark.parametrize("form", FORMS)
def test_show(root: Path, form: str) -> None:
    (said, *_) = json.loads(done("show", root / form, "--json"))
    assert said["kind"] == FORMS[form]
    assert said["checksums"]
    assert said["bytes"] == sum(tensor["bytes"] for tensor in said["tensors"].values())
    name = next(n for n, t in said["tensors"].items() if t["shape"] == [16, 16])
    assert said["tensors"][name]["dtype"] == "F32"
    text = done("show", root / form)
    assert re.search(rf"^{re.escape(name)} +16 x 16 +F32 +1.0 KiB +\S+$", text, re.MULTILINE), text
    assert name not in done("show", root / form, "--summary")


def test_show_tells_the_plan_and_the_step(root: Path) -> None:
    text = done("show", root / "runs")
    assert re.search(r"step-1 +1 .*\nstep-2 +2 .*world 1 +step 2, epoch 0", text)
    assert re.search(r"^  extra +step 2, epoch 0$", text, re.MULTILINE)
    (first, second) = json.loads(done("show", root / "runs", "--json"))
    assert (first["extra"]["step"], second["extra"]["step"]) == (1, 2)
    assert second["plan"]["world"] == 1
    assert second["ties"] == {"model/2.weight": "model/0.weight"}
    assert second["sections"]["optimizer"]["tensors"] == 12


def test_show_of_a_training_file_and_an_optimizer(root: Path) -> None:
    (training,) = json.loads(done("show", root / "training.pt", "--json"))
    assert training["epoch"] == 3
    assert set(training["sections"]) == {"model", "optimizer"}
    assert "param_groups.0.lr" in done("show", root / "optimizer.bin")


# verify


@pytest.mark.parametrize("form", [*FORMS, "bin"])
def test_verify_of_what_is_sound(root: Path, form: str) -> None:
    assert re.search(r": sound \(\d+ tensors, [\d,]+ bytes in \d+ files\)", done("verify", root / form))


def test_files_without_checksums_are_said_to_be_so(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "it has no checksums, so damage to the values would not be seen" in done("verify", tmp_path)
    (said,) = json.loads(done("show", tmp_path, "--json"))
    assert not said["checksums"]


def flip(path: Path, values: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(values) + 1] ^= 1
    path.write_bytes(raw)


def file_with(folder: Path, values: bytes) -> Path:
    return next(path for path in sorted(folder.iterdir()) if values in path.read_bytes())


@pytest.mark.parametrize("form", ["run", "bin", "safe", "model.bin", "model.safetensors"])
def test_verify_names_file_and_tensor(tmp_path: Path, form: str) -> None:
    weights = write_all(tmp_path)
    values = weights["1.weight"].numpy().tobytes()
    folder = tmp_path / ("runs/step-2" if form == "run" else form)
    file = file_with(folder, values) if folder.is_dir() else folder
    flip(file, values)
    text = refused("verify", folder)
    name = "model/1.weight" if form == "run" else "1.weight"
    assert re.search(rf"^{re.escape(str(file))}: {name}: .*checksum", text, re.MULTILINE), text
    assert ": 1 fault\n" in text


def test_verify_goes_on_after_a_fault(tmp_path: Path) -> None:
    weights = write_all(tmp_path)
    folder = tmp_path / "runs/step-2"
    flip(file_with(folder, weights["1.weight"].numpy().tobytes()), weights["1.weight"].numpy().tobytes())
    lost = file_with(folder, weights["0.weight"].numpy().tobytes())
    lost.unlink()
    text = refused("verify", tmp_path / "runs")
    assert re.search(r"model/1.weight: .*checksum", text)
    assert f"{lost}: model/0.weight: the checkpoint lacks its file" in text
    assert "step-1: sound" in text
    assert re.search(r"step-2: \d+ faults", text)


def test_verify_of_a_lost_shard_and_a_lost_rank(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / "bin/pytorch_model-00002.bin").unlink()
    assert "pytorch_model-00002.bin: 1.weight: there is no file" in refused("verify", tmp_path / "bin")
    folder = tmp_path / "runs/step-1"
    manifest = read_manifest(folder)
    del manifest.tensors["random/0"]
    manifest.write(folder)
    assert "random/0: the random state of this rank is missing" in refused("verify", folder)


def test_verify_of_a_damaged_manifest_or_index(tmp_path: Path) -> None:
    write_all(tmp_path)
    manifest = tmp_path / "runs/step-2/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step":2', '"step":3'))
    assert f"{manifest}: is damaged: its checksum" in refused("verify", manifest.parent)
    index = tmp_path / "safe/model.safetensors.index.json"
    index.write_text(index.read_text()[:-20])
    assert f"{index}: cannot be read as JSON" in refused("verify", index.parent)


@pytest.mark.parametrize("size_per_shard", [1024, 1e-4], ids=["within a file", "a whole file"])
def test_a_tensor_that_the_manifest_does_not_name(tmp_path: Path, size_per_shard: float) -> None:
    booster, *_ = kept = trained()
    booster.save(tmp_path / "run", size_per_shard=size_per_shard)
    manifest = read_manifest(tmp_path / "run")
    lost = manifest.tensors.pop("optimizer/1.weight/exp_avg")
    manifest.write(tmp_path / "run")
    assert f"{lost.boxes[0].file}: " in refused("verify", tmp_path / "run")
    with pytest.raises(
        RuntimeError, match=rf"{lost.boxes[0].file} .*manifest.json does not name: it was edited"
    ):
        booster.load(tmp_path / "run")
    assert kept


def test_what_a_killed_save_left_is_no_fault(tmp_path: Path) -> None:
    booster, *_ = kept = trained()
    booster.save(tmp_path / "run")
    (tmp_path / "run/0123abcd-00000-00000.safetensors").write_bytes(b"half a fi")
    text = done("verify", tmp_path / "run")
    assert re.search(r"sound \(.*\); beside it 1 files of a save that was interrupted", text)
    assert kept


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from colossalai.cli.ckpt import _progress

    for screen, total, is_shown in (
        (Terminal(), 1 << 30, True),
        (Terminal(), 10, False),
        (io.StringIO(), 1 << 30, False),
    ):
        monkeypatch.setattr("sys.stderr", screen)
        with _progress(total, "verifying x") as advance:
            advance(total)
        assert ("verifying x: 100%" in screen.getvalue()) == is_shown


# convert


def loaded(path: Path) -> dict[str, Tensor]:
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    Booster("cpu").load_model(model, path)
    return model.state_dict()


SOURCES = [
    "runs",
    "bin/pytorch_model.bin.index.json",
    "safe",
    "model.bin",
    "model.safetensors",
    "training.pt",
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", ["folder", "one.safetensors", "one.bin"])
def test_convert(root: Path, weights: dict[str, Tensor], tmp_path: Path, source: str, target: str) -> None:
    done("convert", root / source, tmp_path / target)
    done("verify", tmp_path / target)
    for name, value in loaded(tmp_path / target).items():
        assert_equal(value, weights[name])


@pytest.mark.parametrize("source", ["safe", "runs"])
def test_convert_to_a_checkpoint_and_back(
    root: Path, weights: dict[str, Tensor], tmp_path: Path, source: str
) -> None:
    done("convert", root / source, tmp_path / "run", "--to", "checkpoint", "--size_per_shard", 1e-3)
    booster = Booster("cpu")
    model, *_ = booster.boost(build())
    booster.load(tmp_path / "run")
    for name, value in model.state_dict().items():
        assert_equal(value, weights[name])
    done("convert", tmp_path / "run", tmp_path / "back", "--size_per_shard", 1e-3)
    assert (tmp_path / "back/model.safetensors.index.json").is_file()
    for name, value in loaded(tmp_path / "back").items():
        assert_equal(value, weights[name])


def test_shards_of_an_optimizer_become_one_file(root: Path, tmp_path: Path) -> None:
    done("convert", root / "bin/pytorch_optim.bin.index.json", tmp_path / "optimizer.bin")
    whole = load_shard_state_dict(root / "optimizer.bin")
    merged = load_shard_state_dict(tmp_path / "optimizer.bin")
    assert merged["param_groups"] == whole["param_groups"]
    for number, state in whole["state"].items():
        for name, value in state.items():
            assert_equal(merged["state"][number][name], value)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_convert_to_another_dtype(
    root: Path, weights: dict[str, Tensor], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    done("convert", root / "runs", tmp_path / "out.safetensors", "--dtype", name)
    for key, value in load_shard_state_dict(tmp_path / "out.safetensors").items():
        assert_equal(value, weights[key].to(dtype))


def test_exact_weights_are_taken_from_the_masters(tmp_path: Path) -> None:
    from colossalai.booster.mixed_precision import BF16MixedPrecision

    booster = Booster("cpu", mixed_precision=BF16MixedPrecision(half_weights=True))
    model = build()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    booster.backward(model(torch.arange(4)).square().mean(), optimizer)
    optimizer.step()
    booster.save(tmp_path / "run")
    stored: dict[str, Any] = {t.name: t.dtype for t in read_manifest(tmp_path / "run").tensors.values()}
    assert stored["model/1.weight"] == torch.bfloat16
    done("convert", tmp_path / "run", tmp_path / "half.safetensors")
    done("convert", tmp_path / "run", tmp_path / "exact.safetensors", "--dtype", "fp32")
    half, exact = (
        load_shard_state_dict(tmp_path / f"{n}.safetensors")["1.weight"] for n in ("half", "exact")
    )
    assert half.dtype == torch.bfloat16
    assert exact.dtype == torch.float32
    assert_equal(exact.bfloat16(), half)
    assert not torch.equal(exact, half.float()), "the digits that bf16 lacks"


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from colossalai.checkpoint_io.inspection.views import RunView

    write_all(tmp_path)
    alive: set[int] = set()
    most = 0
    original = RunView.read

    def read(self: RunView, name: str) -> Tensor:
        nonlocal most
        copy = original(self, name).clone()
        alive.add(id(copy))
        weakref.finalize(copy, alive.discard, id(copy))
        most = max(most, len(alive))
        return copy

    monkeypatch.setattr(RunView, "read", read)
    done("convert", tmp_path / "runs", tmp_path / "out", "--dtype", "bf16")
    assert 1 <= most <= 2


def test_transformers_opens_what_is_converted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    booster = Booster("cpu")
    kept = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save(tmp_path / "run")
    assert kept.model is not None
    config.save_pretrained(tmp_path / "config")
    shards = ("--config", tmp_path / "config", "--size_per_shard", 5e-3)
    done("convert", tmp_path / "run", tmp_path / "hf", *shards)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    again, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in again.state_dict().items():
        assert_equal(value, model.state_dict()[name])
    # and the reverse: what transformers saves, as a checkpoint; its tied head has no name of its own there
    again.save_pretrained(tmp_path / "pretrained")
    done("convert", tmp_path / "pretrained", tmp_path / "start", "--to", "checkpoint")
    fresh = transformers.GPT2LMHeadModel(config)
    booster = Booster("cpu")
    booster.boost(fresh)
    booster.load(tmp_path / "start")
    for name, value in fresh.state_dict().items():
        assert_equal(value, model.state_dict()[name])


# what is refused


def test_wrong_paths(root: Path, tmp_path: Path) -> None:
    for command in (["show"], ["verify"]):
        assert "Error: there is no checkpoint at" in refused(*command, tmp_path / "absent")
        assert re.search(
            r"holds no checkpoint: no manifest\.json .* no index of shards", refused(*command, tmp_path)
        )
    assert "there is no checkpoint at" in refused("convert", tmp_path / "absent", tmp_path / "out")
    (tmp_path / "text.bin").write_text("no weights")
    assert "is not a checkpoint that can be read" in refused("show", tmp_path / "text.bin")
    assert "text.bin: is not a checkpoint that can be read" in refused("verify", tmp_path / "text.bin")


def test_refused_conversions(root: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    cases = [
        ((root / "runs", tmp_path / "taken"), "exists; pass a new path"),
        (
            (root / "runs", tmp_path / "out", "--section", "model2"),
            "has no section 'model2' with tensors; its sections are",
        ),
        ((root / "optimizer.bin", tmp_path / "out"), "must end in .bin or .pt"),
        ((root / "optimizer.bin", tmp_path / "out.bin"), "is one file already; there is nothing to convert"),
        (
            (root / "bin/pytorch_optim.bin.index.json", tmp_path / "out.bin", "--dtype", "fp16"),
            "--dtype is for weights",
        ),
        (
            (root / "bin/pytorch_optim_group.bin", tmp_path / "out"),
            "holds no weights: it is a checkpoint of kind",
        ),
    ]
    for arguments, message in cases:
        assert message in refused("convert", *arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


def test_too_large_for_fp16(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e6)
    Booster("cpu").save_model(model, tmp_path / "m.safetensors")
    text = refused("convert", tmp_path / "m.safetensors", tmp_path / "out", "--dtype", "fp16")
    assert re.search(r"weight holds 1e\+06, which torch.float16 cannot; choose bf16 or fp32", text)
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"], "no draft is left"


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    booster, model, _ = trained()
    booster.save_model(model, tmp_path / "pytorch_model.bin")
    booster.save_model(model, tmp_path / "model.safetensors")
    assert "holds several checkpoints; pass the path of one" in refused("convert", tmp_path, tmp_path / "out")


def test_a_note_if_transformers_will_lack_its_config(root: Path, tmp_path: Path) -> None:
    assert "Note: no config.json in" in done("convert", root / "safe", tmp_path / "out")
