"""A folder of Hugging Face as the model of a service: looked at before anything starts, then read by each
rank, its own part only.

Nothing in a folder is executed: weights are safetensors, and code that a folder brings along is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_GIVE_ONE = "give the folder of one (--tokenizer, or tokenizer_path in a config file)"
# the tokens of a prompt and its answer, as configs call them
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class FolderError(ValueError):
    """A folder that cannot be served; the message says what to do."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder that was looked at."""

    path: Path
    config: Any
    tokenizer: Any
    max_length: int


def inspect_folder(
    path: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
) -> ModelFolder:
    """Refuse in one line what ranks would refuse in many: weights, tokenizer, heads, layers, context."""
    path = Path(path)
    if not path.is_dir():
        raise FolderError(
            f"{path} is not a folder; give one with config.json, model.safetensors and a tokenizer"
        )
    _check_weights(path)
    config = _config(path)
    _check_cut(config, tp, pp)
    most = next((getattr(config, name) for name in _LENGTHS if getattr(config, name, None)), None)
    if max_length is None and most is None:
        raise FolderError(f"{path}/config.json does not say how long texts may be; pass --max-length")
    if max_length is not None and most is not None and max_length > most:
        raise FolderError(
            f"--max-length {max_length} is more than the {most} positions of the model in {path}"
        )
    return ModelFolder(path, config, _tokenizer(tokenizer or path, config), max_length or int(most or 0))


def _check_weights(path: Path) -> None:
    if any((path / name).is_file() for name in _WEIGHTS):
        return
    pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
    if pickles:
        raise FolderError(
            f"{path} holds pickles ({', '.join(pickles[:3])}), which could run code, and no"
            " safetensors; convert"
            f" it first: colossalai ckpt convert {path} NEW_FOLDER"
        )
    raise FolderError(f"{path} holds no weights: there is no model.safetensors and no index of shards")


def _config(path: Path) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        written = json.loads((path / "config.json").read_text())
        if "auto_map" in written:
            raise FolderError(f"{path}/config.json wants to run code of its own (auto_map), which is refused")
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except FolderError:
        raise
    except Exception as error:
        raise FolderError(f"{path}/config.json cannot be read: {error}".split("\n")[0]) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise FolderError(f"{path} holds a {config.model_type}, which is no model that continues texts")
    return config


def _check_cut(config: Any, tp: int, pp: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if tp > 1 and heads is not None and heads % tp:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise FolderError(f"--tp {tp} does not divide the model's {heads} attention heads; {fits} do")
    layers = getattr(config, "num_hidden_layers", None)
    if layers is not None and pp > layers:
        raise FolderError(f"--pp {pp} is more than the model's {layers} layers")


def open_tokenizer(path: str | Path, *, known: bool = False) -> Any:
    """The tokenizer in a folder; nothing in it is executed.

    With ``known`` also one of the hub that was downloaded before, by its name.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    # without any of these, transformers makes a tokenizer that knows no words
    found = folder.is_dir() and any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
    if not found and (folder.is_dir() or not known):
        raise FolderError(f"{path} holds no tokenizer; {_GIVE_ONE}")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise FolderError(f"{path} holds no tokenizer that can be opened ({first}); {_GIVE_ONE}") from error


def _tokenizer(path: str | Path, config: Any) -> Any:
    tokenizer = open_tokenizer(path)
    if len(tokenizer) > config.vocab_size:
        raise FolderError(
            f"the tokenizer in {path} knows {len(tokenizer)} tokens, the model {config.vocab_size}"
        )
    return tokenizer


def load_model(path: str | Path, dtype: torch.dtype | None = None) -> Any:
    """This rank's part of the model in ``path``, cut as the job was launched, ready to generate."""
    from colossalai.inference import load_model as load

    return load(path, dtype=dtype)


def filled(model: Any, path: str | Path) -> Any:
    """A model on the meta device, cut as the job was launched, with the weights in ``path``."""
    from colossalai.checkpoint_io import load_pretrained

    return load_pretrained(cut(model), path).eval().requires_grad_(False)


def cut(model: Any) -> Any:
    """This rank's part of ``model`` in the launched job: its stage, of which it has a piece."""
    from colossalai.context import ParallelMode
    from colossalai.core import global_context as gpc
    from colossalai.nn import parallelize
    from colossalai.pipeline import split_model
    from colossalai.pipeline.stage import Placement

    if gpc.is_initialized(ParallelMode.PIPELINE) and gpc.pipeline_parallel_size > 1:
        return split_model(model, Placement(gpc.pipeline_parallel_size))
    return parallelize(model)


def build_generator(
    path: str, *, tokenizer: str | None = None, dtype: str | None = None, **options: Any
) -> Any:
    """The generator of this rank, on the folder ``path``; ``options`` are those of ``Generator``."""
    from colossalai.inference import Generator

    found = open_tokenizer(tokenizer or path)
    return Generator(load_model(path, None if dtype is None else DTYPES[dtype]), found, **options)
