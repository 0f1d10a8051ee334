"""Rows of tokens: from text, or random."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import AutoTokenizer, GPT2Tokenizer, PretrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from colossalai.core import global_context as gpc
from colossalai.utils import get_dataloader

# in an epoch, and for evaluation
SYNTHETIC_STEPS, SYNTHETIC_EVAL_STEPS = 10, 2

Texts = tuple[str, str]  # to train, to evaluate


def read_texts(args: argparse.Namespace) -> Texts | None:
    """None for random tokens."""
    if args.synthetic:
        return None
    if args.dataset_name is not None:
        return _split(_from_library(args.dataset_name, args.dataset_config_name), args)
    held = {} if args.validation_file is None else {"validation": args.validation_file.read_text()}
    return _split({"train": args.train_file.read_text(), **held}, args)


def _from_library(name: str, config: str | None) -> dict[str, str]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--dataset_name needs the library datasets; pip install datasets, or pass a file of text to"
            " --train_file"
        ) from None
    parts: Any = datasets.load_dataset(name, config)
    return {part: "\n".join(parts[part]["text"]) for part in ("train", "validation") if part in parts}


def _split(parts: dict[str, str], args: argparse.Namespace) -> Texts:
    if "validation" in parts:
        return parts["train"], parts["validation"]
    text = parts["train"]
    cut = len(text) * args.validation_split_percentage // 100
    return text[cut:], text[:cut]


def tokenizer_of(args: argparse.Namespace) -> Any:
    """That of the checkpoint, or one whose tokens are bytes: that needs no file."""
    folder = args.tokenizer_name or args.model_name_or_path
    if folder is not None and Path(folder).is_dir():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    alphabet = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    return GPT2Tokenizer(vocab={**alphabet, "<|endoftext|>": len(alphabet)}, merges=[])


def rows(texts: Texts, tokenizer: Any, length: int, least: int) -> list[Dataset]:
    """The texts cut into rows of ``length`` tokens; a rest that fills none is left out."""
    found: list[Dataset] = []
    for name, text in zip(("training", "validation"), texts, strict=True):
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        count = len(tokens) // length
        if count < least:
            raise ValueError(
                f"the {name} text has {len(tokens)} tokens, {count} rows of --block_size {length}; at least"
                f" {least} rows are needed, one for each process"
            )
        found.append(TensorDataset(tokens[: count * length].view(count, length)))
    return found


def random_rows(vocabulary: int, length: int, counts: list[int], seed: int) -> list[Dataset]:
    generator = torch.Generator().manual_seed(seed)
    return [TensorDataset(torch.randint(vocabulary, (n, length), generator=generator)) for n in counts]


def block_size(args: argparse.Namespace, config: PretrainedConfig) -> int:
    most = config.max_position_embeddings
    if args.block_size is not None and args.block_size > most:
        raise ValueError(f"--block_size {args.block_size} is more than the model's {most} positions")
    return args.block_size or min(1024, most)


def build_datasets(
    args: argparse.Namespace, config: PretrainedConfig, texts: Texts | None, tokenizer: Any
) -> list[Dataset]:
    """To train, to evaluate."""
    length, ranks = block_size(args, config), gpc.data_parallel_size
    if texts is not None:
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"the tokenizer knows {len(tokenizer)} tokens, the model {config.vocab_size}; give the"
                " model's own to --tokenizer_name"
            )
        return rows(texts, tokenizer, length, ranks)
    counts = [
        SYNTHETIC_STEPS * args.per_device_train_batch_size * ranks,
        SYNTHETIC_EVAL_STEPS * args.per_device_eval_batch_size * ranks,
    ]
    return random_rows(config.vocab_size, length, counts, args.seed)


def build_loaders(args: argparse.Namespace, datasets: list[Dataset]) -> list[DataLoader]:
    sizes = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    return [
        get_dataloader(dataset, shuffle=first, seed=args.seed, batch_size=size, collate_fn=_stack)
        for dataset, size, first in zip(datasets, sizes, (True, False), strict=True)
    ]


def _stack(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    ids = torch.stack([row for (row,) in samples])
    return {"input_ids": ids, "labels": ids}
