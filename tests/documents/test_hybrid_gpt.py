"""GPT split by hand, with its embedding tied over stages (page 11): it trains as written and equals the
serial model.
"""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.context.fake_launch import fake_launch
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.testing import parametrize_sample, spawn
from colossalai.testing.parity import Problem, check_plan
from tests.documents.hand_split import HandSplitRun
from tests.documents.pages import code
from tests.documents.scripts import prepare, run, stand_in

ON_CPU = ("torch.device('cuda')", "torch.device('cpu')")
VOCABULARY = 2304  # as large as it must be to be cut
SMALL = (
    ("hidden_size=1600, num_attention_heads=32", "hidden_size=16, num_attention_heads=4, vocab_size=2304"),
    ("build_gpt_pipeline(48", "build_gpt_pipeline(4"),
)


class LettersTokenizer:
    """In place of GPT-2's, which is downloaded: a letter is a token."""

    unk_token, pad_token = "?", None

    @classmethod
    def from_pretrained(cls, name: str) -> LettersTokenizer:
        assert name == "gpt2"
        return cls()

    def __call__(
        self, texts: list[str], padding: bool, truncation: bool, max_length: int, return_tensors: str
    ) -> dict[str, Tensor]:
        assert (padding, truncation, return_tensors, self.pad_token) == (True, True, "pt", self.unk_token)
        texts = [text[:max_length] for text in texts]
        longest = max(map(len, texts))
        ids = [[*text.encode()] + [ord(self.unk_token)] * (longest - len(text)) for text in texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def load_page(folder: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    """The whole page, small, as a script that has not started to train."""
    prepare(folder, arguments=["--backend", "gloo"])
    torch.set_num_threads(1)
    stand_in("transformers", GPT2Tokenizer=LettersTokenizer)
    os.environ["DATA"] = str(folder / "train.json")
    return run(
        code("11.imports"),
        code("11.model", ON_CPU, *SMALL),
        code("11.dataset"),
        code("11.train", *changes),
    )


SHORT = (
    ("NUM_EPOCHS = 60", "NUM_EPOCHS = 2"),
    ("SEQ_LEN = 1024", "SEQ_LEN = 16"),
    ("BATCH_SIZE = 192", "BATCH_SIZE = 4"),
    ("NUM_MICRO_BATCHES = 192", "NUM_MICRO_BATCHES = 4"),
    ("display_progress=True", "display_progress=False"),
    ("return_output_label=False,\n    )", "return_output_label=False,\n    )\n    return trainer"),
)
# what the page means by NUM_CHUNKS; a config says it with num_chunks of the model
CHUNKS = (
    ("NUM_CHUNKS = None", "NUM_CHUNKS = 2"),
    ("CONFIG = dict(NUM_MICRO_BATCHES", "CONFIG = dict(NUM_CHUNKS=2, NUM_MICRO_BATCHES"),
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Loose JSON: 14 lines, some shorter than a sequence, some longer; and the page's data set of it."""
    lines = [json.dumps({"text": "to be, or not to be, that is it"[: 9 + i]}) for i in range(14)]
    (tmp_path / "train.json").write_text("\n".join(lines))
    spawn(check_dataset, 1, folder=tmp_path)
    assert (
        tmp_path / "gpt_webtext_16.pt"
    ).is_file()  # which the ranks of a job must not write at the same time
    return tmp_path


def check_dataset(rank: int, world_size: int, port: int, folder: Path) -> None:
    data = load_page(folder)["WebtextDataset"](os.environ["DATA"], seq_len=16)
    assert len(data) == 14
    batch, label = data[0]
    assert label.tolist() == [*b"to be, or"] + [ord("?")] * 7
    assert batch["attention_mask"].tolist() == [1] * 9 + [0] * 7
    assert torch.equal(batch["input_ids"], label)


def check_training(
    rank: int, world_size: int, port: int, folder: Path, changes: tuple[tuple[str, str], ...]
) -> tuple[type, int, float]:
    names = load_page(folder, *SHORT, *changes)
    trainer = names["train"]()
    model = trainer.engine.model
    assert {p.dtype for p in model.parameters()} == {torch.half}
    loss = trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()
    return type(trainer.engine.schedule), trainer.cur_step, float(loss)


@pytest.mark.parametrize("chunks", [1, 2])
def test_page_11_trains(chunks: int, text: Path) -> None:
    changes = CHUNKS if chunks > 1 else ()
    ranks = spawn(check_training, 4, folder=text, changes=changes, timeout=120)
    schedule = InterleavedPipelineSchedule if chunks > 1 else PipelineSchedule
    assert {(kind, steps) for kind, steps, _ in ranks} == {(schedule, 6)}  # 2 epochs of 14 // 4 batches
    assert all(abs(loss - math.log(VOCABULARY)) < 1 for *_, loss in ranks)


def check_full_sizes(rank: int, world_size: int, port: int) -> dict[str, int]:
    """Parameters of a stage of each model as the page builds it, on the meta device: GPT-3 fits no CPU."""
    stand_in("transformers", GPT2Tokenizer=LettersTokenizer)
    config = {"parallel": {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}}
    with fake_launch(config, rank=0, world_size=4):
        names = run(code("11.imports"), code("11.model", ("device('cuda')", "device('meta')")))
        with torch.device("meta"):
            stages = {name: names[name](checkpoint=True, dtype=torch.half) for name in FULL_SIZES}
    return {name: sum(p.numel() for p in stage.parameters()) for name, stage in stages.items()}


# hidden size, layers, positions
FULL_SIZES = {"GPT2_exlarge_pipeline_hybrid": (1600, 48, 1024), "GPT3_pipeline_hybrid": (12288, 96, 2048)}


def test_page_11_full_sizes() -> None:
    (found,) = spawn(check_full_sizes, 1)
    for name, (hidden, layers, positions) in FULL_SIZES.items():
        # matrices are cut in two, and so are the biases inside of attention and MLP; those of the stream are
        # not
        block = 12 * hidden**2 // 2 + (3 + 4) * hidden // 2 + 6 * hidden
        assert found[name] == 50304 * hidden // 2 + positions * hidden // 2 + layers // 2 * block


# ---- the page's stages equal the serial model ----

DEPTH = 4
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8,
    "checkpoint": True,
}
TABLE = "embedding.word_embeddings.weight"


def serial_name(name: str, start: int) -> str:
    if name.startswith("blocks."):
        _, number, rest = name.split(".", 2)
        return f"blocks.{int(number) + start}.{rest}"
    return TABLE if name == "head.dense.weight" else name


def check_parity(rank: int, world_size: int, port: int, plan: dict[str, Any], chunks: int) -> None:
    torch.set_num_threads(1)
    stand_in("transformers", GPT2Tokenizer=LettersTokenizer)
    names = run(code("11.imports"), code("11.model", ON_CPU))
    torch.manual_seed(0)
    whole: nn.Module = names["PipelineGPTHybrid"](num_layers=DEPTH, first=True, last=True, **SIZES)
    whole.head.dense.weight = whole.embedding.word_embeddings.weight  # type: ignore[union-attr,assignment]
    rows = 4 * world_size // (plan["pipeline"] * plan.get("tensor", {"size": 1})["size"])
    mask = torch.ones(rows, 8, dtype=torch.long)
    mask[0, 5:] = 0
    ids = [torch.randint(VOCABULARY, (rows, 8)) for _ in range(3)]
    batches = [({"input_ids": i, "attention_mask": mask}, i) for i in ids]
    criterion = names["GPTLMLoss"]()
    problem = Problem(
        build=lambda: copy.deepcopy(whole), batches=batches, loss=lambda m, b: criterion(m(**b[0]), b[1])
    )
    config: dict[str, Any] = {"parallel": plan, "NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": chunks}
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    assert gpc.is_initialized(ParallelMode.PIPELINE)
    stages = names["build_gpt_pipeline"](DEPTH, chunks, **SIZES)
    loss = names["GPTLMLoss"]()
    check_plan(problem, lambda p: HandSplitRun(p, stages, serial_name, DEPTH, loss))


PLANS: list[tuple[int, dict[str, Any], int]] = [
    (8, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 1),  # and 2 data-parallel ranks
    (2, {"pipeline": 2}, 1),
    (4, {"pipeline": 4}, 1),
    (4, {"pipeline": 2}, 2),
    (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 2),
]


@parametrize_sample("nprocs, plan, chunks", PLANS, n=2)
def test_page_11_stages_equal_the_serial_model(nprocs: int, plan: dict[str, Any], chunks: int) -> None:
    spawn(check_parity, nprocs, plan=plan, chunks=chunks, timeout=120)
