"""``save_pretrained`` of boosted models: what is written is the whole model as it is trained, under every
plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.pipeline import save_pretrained, split_model
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers")

PLUGINS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero-2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "gemini cpu": lambda: GeminiPlugin(device="cpu", precision="fp32"),
    "gemini cuda": lambda: GeminiPlugin(device="cpu", precision="fp32", placement_policy="cuda"),
}


def gpt2(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=8,
        n_embd=8,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config)


WORDS = torch.arange(8).view(1, 8)


def serial() -> dict[str, Tensor]:
    model = gpt2()
    model(WORDS, labels=WORDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


def compare(folder: Path, expected: dict[str, Tensor], what: str) -> None:
    found = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text: f"{what}, {name}: {text}")  # noqa: B023


def launch(rank: int, world_size: int, port: int, **config: Any) -> None:
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def check_plugins(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    expected = serial()
    for name, plugin in PLUGINS.items():
        booster = Booster(device="cpu" if "gemini" not in name else None, plugin=plugin())
        inner = gpt2()
        model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        assert optimizer is not None
        booster.backward(model(WORDS, labels=WORDS).loss, optimizer)
        optimizer.step()
        if rank == 0 or name not in (
            "none",
            "ddp",
            "zero-2",
        ):  # there one process holds all, and may write alone
            model.save_pretrained(folder / name)  # type: ignore[operator]
        if name == "gemini cpu":
            for wrong in (inner.save_pretrained, partial(save_pretrained, inner)):
                with pytest.raises((RuntimeError, TypeError), match=r"needs the values of"):
                    wrong(folder / "wrong")
        dist.barrier()
        compare(folder / name, expected, name)
        if name == "gemini cpu":
            model.save_pretrained(folder / "given", state_dict=model.state_dict())  # type: ignore[operator]
            compare(folder / "given", expected, "a state_dict")
        if name == "fsdp":
            with pytest.raises(
                (ValueError, RuntimeError), match=r"28 weights .* only pieces of them.*Leave out state_dict"
            ):
                model.save_pretrained(folder / "given", state_dict=model.state_dict())  # type: ignore[operator]
        if name in ("fsdp", "gemini cpu"):
            model.save_pretrained(folder / f"{name} main", is_main_process=rank == 0)  # type: ignore[operator]
            compare(folder / f"{name} main", expected, f"{name}, is_main_process")
            with pytest.raises(RuntimeError, match=r"call model.save_pretrained\(folder, push_to_hub=True"):
                model.push_to_hub("somewhere")  # type: ignore[operator]
        dist.barrier()


def test_every_plugin_writes_the_whole_model(tmp_path: Path) -> None:
    spawn(check_plugins, 2, folder=tmp_path)


def check_stages(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port, parallel={"pipeline": 2}, NUM_MICRO_BATCHES=1)
    expected = serial()
    for name, plugin in PLUGINS.items():
        if name in ("none", "fsdp"):
            continue
        booster = Booster(device="cpu" if "gemini" not in name else None, plugin=plugin())
        inner = split_model(gpt2())
        model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        assert optimizer is not None
        batch = {"input_ids": WORDS, "labels": WORDS}
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.step()
        save_pretrained(model, folder / name)
        dist.barrier()
        compare(folder / name, expected, name)
        if name == "ddp":  # of which each rank has its stage alone
            with pytest.raises(
                (ValueError, RuntimeError), match=r"weights of the model are not in the state_dict"
            ):
                model.save_pretrained(folder / "given", state_dict=model.state_dict())  # type: ignore[operator]


def test_stages_of_a_boosted_model_are_written_as_one(tmp_path: Path) -> None:
    spawn(check_stages, 2, folder=tmp_path)


def check_chunks(rank: int, world_size: int, port: int, folder: Path) -> None:
    parallel = {"pipeline": {"size": 2, "schedule": "interleaved"}}
    launch(rank, world_size, port, parallel=parallel, NUM_MICRO_BATCHES=2, NUM_CHUNKS=2)
    serial = gpt2(layers=4)
    expected = {name: value.clone() for name, value in serial.state_dict().items()}
    model, *_ = Booster(plugin=TorchDDPPlugin()).boost(split_model(serial))
    model.save_pretrained(folder)  # type: ignore[operator]
    found = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(RuntimeError, match="these are 2 stages of a pipeline, not the whole model"):
        model.unwrap().save_pretrained(folder)  # type: ignore[operator]


def test_several_stages_of_a_rank_have_the_method_too(tmp_path: Path) -> None:
    spawn(check_chunks, 2, folder=tmp_path)


class Own(nn.Module):
    """A model with a ``save_pretrained`` of its own, which knows nothing of a ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder)


def test_a_method_without_a_state_dict(tmp_path: Path) -> None:
    from colossalai.zero.gemini import GeminiDDP

    torch.manual_seed(0)
    inner = Own()
    expected = {name: value.clone() for name, value in inner.state_dict().items()}
    model = GeminiDDP(inner, "cpu", dtype=torch.float32)
    model.save_pretrained(tmp_path / "own")  # type: ignore[operator]
    found = torch.load(tmp_path / "own")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(AttributeError):
        GeminiDDP(nn.Linear(2, 2), "cpu").save_pretrained  # noqa: B018
