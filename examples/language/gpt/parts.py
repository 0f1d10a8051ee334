"""What ``train_gpt.py`` is made of: the objects of a plain training, from the variables of a config.

A config is checked here as a whole, on every rank and before the ranks wait for each other; what the
``parallel`` section may hold, ``colossalai.launch`` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from colossalai.builder import build_from_registry
from colossalai.context import Config
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.mesh import full_shape, local_shape
from colossalai.nn.modes import current
from colossalai.registry import LOSSES, MODELS
from colossalai.utils import get_dataloader
from titans.dataloader.webtext import SyntheticText, WebtextDataset

NEEDED = ("BATCH_SIZE", "SEQ_LEN", "NUM_EPOCHS", "optimizer", "model", "parallel")


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what would fail later, by the names of the variables."""
    if missing := [name for name in NEEDED if config.get(name) is None]:
        raise ConfigException(f"the config has no {', '.join(missing)}; see gpt2_configs for complete ones")
    for name in ("BATCH_SIZE", "SEQ_LEN", "NUM_EPOCHS"):
        if not isinstance(config[name], int) or isinstance(config[name], bool) or config[name] < 1:
            raise ConfigException(f"{name} must be a positive integer, got {config[name]!r}")
    if config.get("loss") is None and config.get("loss_fn") is None:
        raise ConfigException("the config has no loss; write loss = dict(type=GPTLMLoss)")
    micro_batches = config.get("NUM_MICRO_BATCHES") or 1
    if config["BATCH_SIZE"] % micro_batches:
        raise ConfigException(
            f"NUM_MICRO_BATCHES = {micro_batches} does not divide BATCH_SIZE = {config['BATCH_SIZE']};"
            " every micro-batch has equally many rows"
        )


def fit_to_plan(config: Config) -> None:
    """Compare the sizes with the launched plan, and make ``TENSOR_SHAPE`` the piece that a rank holds."""
    tp, mesh = current()
    rows = config.BATCH_SIZE // (config.get("NUM_MICRO_BATCHES") or 1)
    cuts = [] if mesh is None else [mesh.group_size(*tp.rest(at).dims[0]) for at in ("hidden", "inner")]
    if any(rows % cut for cut in cuts):
        raise ConfigException(
            f"a micro-batch has BATCH_SIZE / NUM_MICRO_BATCHES = {rows} rows, which tensor mode {tp.mode!r}"
            f" of size {tp.size} divides among {max(cuts)} ranks; make BATCH_SIZE a multiple of"
            f" {max(cuts) * (config.BATCH_SIZE // rows)}"
        )
    shape = config.get("TENSOR_SHAPE")
    if shape is None or mesh is None or tp.size == 1:
        return
    if config.get("HIDDEN_SIZE") is None:
        raise ConfigException("a config with TENSOR_SHAPE and tensor parallelism needs HIDDEN_SIZE")
    whole = (rows, config.SEQ_LEN, config.HIDDEN_SIZE)
    own = tuple(local_shape(whole, tp.hidden, mesh))
    if tuple(shape) not in (whole, own):
        raise ConfigException(
            f"TENSOR_SHAPE = {tuple(shape)} is neither what a stage returns, (BATCH_SIZE //"
            f" NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE) = {whole}, nor a rank's piece of it, {own}; correct"
            " it or leave it out"
        )
    config.TENSOR_SHAPE = own


def build_model(config: Config) -> nn.Module:
    model: nn.Module = build_from_registry(config.model, MODELS)
    return model


def build_criterion(config: Config) -> nn.Module:
    criterion: nn.Module = build_from_registry(config.get("loss_fn") or config["loss"], LOSSES)
    return criterion


def build_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> Optimizer:
    options = dict(config.optimizer)
    optimizer: Optimizer = options.pop("type")(parameters, **options)
    return optimizer


def build_dataloader(config: Config, data: str | None, steps: int) -> DataLoader:
    """Rows of the text at ``data``, or without it ``steps`` batches of random tokens for each epoch."""
    dataset: Dataset
    vocabulary = config.model.get("vocab_size", 50304)
    if data is None:
        count = steps * config.BATCH_SIZE * gpc.data_parallel_size
        dataset = SyntheticText(count, config.SEQ_LEN, vocabulary)
    else:
        dataset = text = WebtextDataset(data, config.SEQ_LEN)
        needed = config.BATCH_SIZE * gpc.data_parallel_size
        if len(text) < needed:
            raise ValueError(
                f"the text at {data} has {len(text)} rows of SEQ_LEN = {config.SEQ_LEN} tokens, fewer than"
                f" one batch: BATCH_SIZE = {config.BATCH_SIZE} for each of {gpc.data_parallel_size}"
                " data-parallel ranks"
            )
    return get_dataloader(dataset, shuffle=True, drop_last=True, batch_size=config.BATCH_SIZE)


def tflop_per_step(model: nn.Module, config: Config) -> float:
    """The work of one rank in one step, in 10**12 operations.

    A token costs 2 operations for each weight going forward and 4 going back, and 2 more where blocks are
    computed again; a rank with a piece of a weight does that part of the work.
    """
    weights = sum(p.numel() for p in model.parameters())
    whole = sum(full_shape(p).numel() for p in model.parameters())
    share = weights / whole if gpc.tensor_parallel_size > 1 else 1.0
    passes = 8 if config.model.get("checkpoint") else 6
    return passes * whole * share * config.BATCH_SIZE * config.SEQ_LEN / 10**12
