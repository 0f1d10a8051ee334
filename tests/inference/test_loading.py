"""Models from folders: no rank ever has more than its pieces and one tensor, and all write the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.inference import Generator, Sampling, load_model
from colossalai.testing import spawn
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.inference.models import Bytes, build, greedy, prompts, trained

COUNT = 6


def load(rank: int, world_size: int, port: int, path: Path, config: Path | None, tp: int, pp: int) -> Any:
    torch.set_num_threads(1)
    parallel: dict[str, Any] = {"tensor": {"size": tp, "mode": "1d"}, "pipeline": pp}
    colossalai.launch(
        {"parallel": parallel}, rank, world_size, "localhost", port, backend="gloo", verbose=False
    )
    with LiveBytes() as live:
        model = load_model(path, config=config)
        peak = live.peak
    largest = max(4 * p.numel() for p in build("llama", num_hidden_layers=6).parameters())
    own = sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})
    written = Generator(model).generate(prompts(), Sampling(max_tokens=COUNT, temperature=0))
    return [c.tokens for c in written], own, peak, largest


PLANS = [("pretrained", 2, 1), ("booster", 1, 2), ("booster", 1, 1)]
MORE = [
    ("pretrained", 1, 1),
    ("pretrained", 1, 2),
    ("pretrained", 2, 2),
    ("booster", 2, 1),
    ("booster", 2, 2),
]


@pytest.mark.parametrize(
    ("saved", "tp", "pp"), [*PLANS, *(pytest.param(*plan, marks=pytest.mark.slow) for plan in MORE)]
)
def test_a_rank_never_holds_more_than_its_pieces_and_one_tensor(
    tmp_path: Path, saved: str, tp: int, pp: int
) -> None:
    model = build("llama", num_hidden_layers=6)
    model.save_pretrained(tmp_path / "pretrained", max_shard_size="40KB")
    booster = Booster(device="cpu")
    booster.boost(model)
    booster.save(tmp_path / "booster")
    expected = [greedy(model, prompt, COUNT) for prompt in prompts()]
    whole = sum(4 * p.numel() for p in model.parameters())
    config = tmp_path / "pretrained" if saved == "booster" else None
    for written, own, peak, largest in spawn(
        load, tp * pp, path=tmp_path / saved, config=config, tp=tp, pp=pp
    ):
        assert written == expected
        assert own < 0.75 * whole or tp * pp == 1
        assert own <= peak <= own + largest + 4096, "small numbers of the rotations come beside it"


def write(rank: int, world_size: int, port: int, path: Path, pp: int) -> list[str]:
    torch.set_num_threads(1)
    parallel: dict[str, Any] = {"tensor": {"size": world_size // pp, "mode": "1d"}, "pipeline": pp}
    colossalai.launch(
        {"parallel": parallel}, rank, world_size, "localhost", port, backend="gloo", verbose=False
    )
    generator = Generator(load_model(path), Bytes(), page_size=4, chunk=7)
    return [c.text for c in generator.generate(TEXTS, Sampling(max_tokens=24, temperature=0))]


TEXTS = ["def ", "import os", "    return self.", "class Error(Exception):\n"]


def test_a_model_that_has_learnt_something_writes_the_same_under_every_plan(tmp_path: Path) -> None:
    model = trained()
    model.save_pretrained(tmp_path)
    expected = [Bytes().decode(greedy(model, Bytes().encode(text), 24)) for text in TEXTS]
    assert len(set(expected)) > 1
    assert any(" " in text for text in expected), "it has seen words"
    alone = Generator(model, Bytes(), page_size=4, pages=20, max_length=60)
    assert [c.text for c in alone.generate(TEXTS, Sampling(max_tokens=24, temperature=0))] == expected
    for ranks, pp in ((4, 2),):
        assert all(found == expected for found in spawn(write, ranks, path=tmp_path, pp=pp))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in"):
        load_model(tmp_path)
    build("llama").save_pretrained(tmp_path / "two")
    other = build("llama", num_hidden_layers=3)
    booster = Booster(device="cpu")
    booster.boost(build("llama"))
    booster.save(tmp_path / "run")
    other.config.save_pretrained(tmp_path / "three")
    with pytest.raises(RuntimeError, match=r"it lacks model/model\.layers\.2\.self_attn\.q_proj\.weight"):
        load_model(tmp_path / "run", config=tmp_path / "three")
