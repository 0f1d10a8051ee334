"""``colossalai generate``: a text in the terminal, from one process or several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from colossalai.cli.app import cli
from colossalai.serving.loading import open_tokenizer
from tests.cli.tools import free_port
from tests.cli.tools import run as run_command
from tests.inference.models import WORDS, build, greedy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    build("llama").save_pretrained(path)
    return path


def invoke(*arguments: object, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *map(str, arguments)], input=given)


def expected(folder: Path, prompt: str) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.decode(greedy(build("llama"), tokenizer.encode(prompt), 12), skip_special_tokens=True)


OPTIONS = ("--max-tokens", 12, "--temperature", 0)


def test_it_writes_what_the_model_writes(folder: Path) -> None:
    for result in (
        invoke(folder, "--prompt", "Hello", *OPTIONS),
        invoke(folder, *OPTIONS, given="Hello"),
    ):
        assert result.exit_code == 0, result.output
        assert result.stdout == expected(folder, "Hello") + "\n"


@pytest.mark.slow  # a launcher, which imports all there is to import once for each process
def test_two_processes_write_the_same(folder: Path) -> None:
    job = ("run", "--nproc_per_node", 2, "--master_port", free_port(), "-m", "colossalai", "generate", folder)
    done = run_command(*job, "--prompt", "Hello", *OPTIONS)
    assert done.code == 0, done
    assert expected(folder, "Hello").encode(errors="replace") in done.out.encode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--top-p", 2), "Sampling(top_p=2.0): top_p must be above 0"),
        (("--tp", 2), "colossalai run --nproc_per_node 2 -m colossalai generate"),
        (("--prompt", ""), "the prompt is empty"),
        (("--tokenizer", "nowhere"), "nowhere holds no tokenizer; give the folder of one (--tokenizer"),
        (("--config", "nowhere", "--prompt", "x"), "nowhere holds no tokenizer; give the folder of one"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: tuple[object, ...], words: str) -> None:
    result = invoke(folder, *arguments, given="x")
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_folder_of_which_transformers_makes_a_tokenizer_without_words(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    result = invoke(folder, "--tokenizer", tmp_path, "--prompt", "x")
    assert f"Error: {tmp_path} holds no tokenizer" in result.output
    with pytest.raises(ValueError, match="holds no tokenizer; give the folder of one"):
        open_tokenizer(tmp_path, known=True)


def test_the_help_has_every_option() -> None:
    result = invoke("--help")
    for option in ("--prompt", "--max-tokens", "--stop", "--seed", "--tp", "--pp", "--config"):
        assert option in result.output
