"""examples/tutorial/opt/opt: the commands of page 49, a checkpoint that is fine-tuned, and taken up again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from colossalai.testing import RankError
from tests.cli.tools import environment_with_package
from tests.examples.scripts import EXAMPLES, run_script

pytest.importorskip("transformers")

FOLDER = EXAMPLES / "tutorial" / "opt" / "opt"
LINES = [
    "Start preparing dataset",
    "Dataset is prepared",
    "Model config has been created",
    "GPT2Tokenizer has been created",
    "Train a new model from scratch",
    "using Colossal-AI version ",
    "Dataloaders have been created",
    "***** Running training *****",
    "  Num examples = ",
    "  Num Epochs = 3",
    "Global step 1 finished",
    "Epoch 0: perplexity: ",
    "Global step 30 finished",
    "Epoch 2: perplexity: ",
    "Training finished",
]


def shell(script: str, *arguments: object, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**environment_with_package(), "OUT": str(out), "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}  # two processes cannot share a GPU under NCCL
    return subprocess.run(
        ["bash", f"./{script}", *map(str, arguments)],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"Epoch \d+: perplexity: \S+ eval_loss: (\S+)", text)]


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """One process and two, whose batches make the same; without dropout on the way they would end alike,
    too.
    """
    found = []
    for batch, ranks in ((4, 1), (2, 2)):
        done = shell("run_clm_synthetic.sh", batch, 0, "tiny", ranks, out=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        assert [line for line in LINES if line in done.stdout] == LINES
        assert "Num examples = 40\n" in done.stdout
        assert "Total train batch size (w. parallel, distributed & accumulation) = 4\n" in done.stdout
        found.append(losses(done.stdout))
        assert (tmp_path / f"colo_tiny_bs_{batch}_cap_0_gpu_{ranks}.log").read_text() == done.stdout
    for one, two in zip(*found, strict=True):  # ln 512 = 6.238
        assert abs(one - two) < 5e-3


def test_too_little_memory(tmp_path: Path) -> None:
    options = ["-s", "--model_name_or_path", "facebook/opt-tiny", "--output_dir", tmp_path]
    with pytest.raises(RankError, match=r"the compute tier holds .* and has no room for"):
        run_script("tutorial/opt/opt/run_clm.py", *options, "--mem_cap", 0.00001)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the example."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("arguments", "data", "models")
    yield {name: __import__(name) for name in names}
    for name in names:
        del sys.modules[name]  # other examples have some as well


def test_sizes(example: dict[str, ModuleType]) -> None:
    counts = {}
    for size in example["models"].SIZES:
        model = example["models"].build(example["models"].opt_config(size), whole=False)
        counts[size] = sum(p.numel() for p in model.parameters())
        assert all(p.is_meta for p in model.parameters())
    expected = {
        "125m": 125e6,
        "350m": 331e6,
        "1.3b": 1.316e9,
        "2.7b": 2.65e9,
        "6.7b": 6.66e9,
        "13b": 12.85e9,
        "30b": 29.97e9,
        "66b": 65.7e9,
    }
    for size, count in expected.items():
        assert abs(counts[size] / count - 1) < 0.01, (size, counts[size])


def test_wrong_arguments(
    example: dict[str, ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse, data, models = example["arguments"].parse_args, example["data"], example["models"]
    for arguments, message in (
        (["--model_name_or_path", "x"], "text is needed: --train_file FILE or --dataset_name NAME"),
        (["-s"], "a model is needed: --model_name_or_path FOLDER"),
        (["-s", "--block_size", "0"], "a whole number of at least 1 is needed, got 0"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"facebook/opt-125m is not a folder with a config.json"):
        models.config_of("facebook/opt-125m", synthetic=False)
    with pytest.raises(ValueError, match=r"no OPT of size 'facebook/opt-126m'; there are tiny, 125m, 350m"):
        models.config_of("facebook/opt-126m", synthetic=True)
    args = parse(["-s", "--config_name", "tiny", "--block_size", "65"])
    with pytest.raises(ValueError, match=r"--block_size 65 is more than the model's 64 positions"):
        data.block_size(args, models.opt_config("tiny"))
    with pytest.raises(ValueError, match=r"the training text has 3 tokens, 0 rows of --block_size 4"):
        data.rows(("abc", "abc"), data.tokenizer_of(args), 4, 1)
    args = parse(["--config_name", "tiny", "--dataset_name", "wikitext", "--dataset_config_name", "small"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"--dataset_name needs the library datasets"):
        data.read_texts(args)
    stand_in = ModuleType("datasets")
    stand_in.load_dataset = lambda *names: {"train": {"text": ["a" * 100, "b" * 99, *names]}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    train, held = data.read_texts(args)
    assert held == "a" * len(held)
    assert (held + train).endswith("b\nwikitext\nsmall")
    assert len(held) == len(held + train) * 5 // 100


def test_a_checkpoint_is_fine_tuned_and_taken_up_again(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = example["arguments"].parse_args(["-s", "--config_name", "tiny"])
    config = example["models"].opt_config("tiny")
    config.dropout = 0.0
    torch.manual_seed(0)
    start = tmp_path / "start"
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(start)
    example["data"].tokenizer_of(args).save_pretrained(start)
    text = tmp_path / "text.txt"
    text.write_text(Path(json.decoder.__file__).read_text()[:8000])
    options = ["--learning_rate", 1e-2, "--gradient_accumulation_steps", 2, "--checkpointing_steps", 3]
    out = tmp_path / "out"
    done = shell("run_clm.sh", start, text, 4, 0, 2, *options, out=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "Finetune a pre-trained model" in done.stdout
    assert "Total train batch size (w. parallel, distributed & accumulation) = 16\n" in done.stdout
    found = losses(done.stdout)
    assert found[-1] < 4.5, "guessing among 512 words is 6.2"

    # the result is a checkpoint of transformers, with the loss that was printed
    tuned, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    _, held = example["data"]._split({"train": text.read_text()}, args)
    ids = torch.tensor(tokenizer(held)["input_ids"])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    with torch.no_grad():
        loss = tuned.float()(input_ids=rows, labels=rows).loss
    assert abs(float(loss) - found[-1]) < 0.05

    # on one process, from the middle, to the same end
    data = ["--model_name_or_path", start, "--train_file", text, "--per_device_train_batch_size", 8]
    resumed = ["--resume_from_checkpoint", out / "step_3", "--output_dir", tmp_path / "again"]
    again = run_script("tutorial/opt/opt/run_clm.py", *data, *options, *resumed)
    assert "Global step 3 finished" not in again
    assert "Global step 4 finished" in again
    assert abs(losses(again)[-1] - found[-1]) < 0.1
