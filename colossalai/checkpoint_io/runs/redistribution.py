"""``save``, ``load``, ``merge`` and ``redist``: checkpoints for scripts that have no booster.

They are runs, as ``booster.save`` writes them: boxes of the tensors of the serial model.  So what one plan
has saved loads under any other, without a description of either; ``merge`` and ``redist`` only change in
which pieces tensors lie in the files.  ``colossalai.utils.checkpoint_io`` is the documented place of these
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.boxes import Box, whole
from colossalai.checkpoint_io.held_tensors import HeldBox, HeldTensor
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.runs.dist_meta import (
    ParamDistMeta,
    RedistMeta,
    boxes_of_plan,
    check_even,
    described,
)
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredTensor, read_manifest
from colossalai.checkpoint_io.runs.reading import RunReader
from colossalai.checkpoint_io.runs.run_state import (
    BoostedRun,
    RunState,
    capture_random_state,
    restore_random_state,
)
from colossalai.checkpoint_io.runs.writing import Contents, Writer
from colossalai.interface import user_module
from colossalai.logging import get_dist_logger
from colossalai.mesh.agreement import Numbers, differ, project

Metas = Mapping[str, ParamDistMeta]

COPIES = "copies"
# of copies that ranks have updated in different orders; pieces of a tensor differ by much more
ROUNDING = 1e-3


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    param_to_os: Mapping[str, int] | None = None,
    dist_meta: Metas | None = None,
    max_shard_size_gb: float = 0.0,
    overwrite: bool = False,
    backend: str = "disk",
    **kwargs: Any,
) -> None:
    """Save a model and its optimizer to the folder ``path``, each rank its part; every rank must call it.

    Args:
        param_to_os: the numbers of the optimizer's states by the names of parameters; only checked, since
            states are stored by these names.
        dist_meta: how the parameters of this rank lie, for those that the script has cut itself.
        max_shard_size_gb: no file becomes larger, unless one tensor is; 0 is no limit.
        overwrite: a checkpoint that is there may be replaced.
        kwargs: numbers, strings, small tensors, lists and dicts that ``load`` returns.
    """
    _check_backend(backend)
    state = RunState([BoostedRun(model, optimizer)], extra=kwargs)

    def collect() -> Contents:
        _check_target(path, overwrite)
        _check_states(model, optimizer, param_to_os)
        contents = state.collect()
        contents.merged[COPIES] = _numbers(contents.entries) if JobRanks().size > 1 else {}
        return contents

    def merged(values: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        _check_copies([part[COPIES] for part in parts])
        return state.merge(values, parts)

    with _described_everywhere(model, dist_meta):
        Writer().save(collect, merged, path, size_per_shard=_size(max_shard_size_gb))


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    redist_meta: RedistMeta | None = None,
    dist_metas: Sequence[Metas] | None = None,
    max_shard_size_gb: float = 0.0,
    backend: str = "disk",
) -> dict[str, Any]:
    """Load what ``save``, ``merge`` or ``redist`` wrote, under any plan; returns the further values.

    Every rank must call it.  A rank reads just what it needs, so ``max_shard_size_gb`` has nothing to limit.
    Random states stay as they are.

    Args:
        redist_meta: how the parameters of ``model`` lie, for those that the script has cut itself.
        dist_metas: how the ranks lay that saved; only checked, since the checkpoint says so.
    """
    _check_backend(backend)
    _size(max_shard_size_gb)
    ranks = JobRanks()
    random = capture_random_state()
    _together(ranks, lambda: _check_names(dist_metas, read_manifest(path)) if dist_metas else None)
    metas = None if redist_meta is None else redist_meta.of_rank(ranks.rank)
    with _described_everywhere(model, metas):
        extra = RunState([BoostedRun(model, optimizer)]).load(path)
    restore_random_state(random)
    return extra


def merge(
    path: str | Path,
    output_path: str | Path,
    max_shard_size_gb: float = 0.0,
    overwrite: bool = False,
    backend: str = "disk",
) -> None:
    """Write the checkpoint at ``path`` anew, with each tensor in one piece.

    In a distributed job every rank calls this, and writes its share of the tensors.
    """
    _rewrite(
        path, output_path, lambda name, tensor: [whole(tensor.shape)], max_shard_size_gb, overwrite, backend
    )


def redist(
    path: str | Path,
    output_path: str | Path,
    redist_meta: RedistMeta,
    dist_metas: Sequence[Metas] | None = None,
    max_shard_size_gb: float = 0.0,
    overwrite: bool = False,
    backend: str = "disk",
) -> None:
    """Write the checkpoint at ``path`` anew, with each tensor in the pieces of the plan ``redist_meta``.

    Loading does not need this: a rank of any plan finds its pieces in any checkpoint.  It reads them in fewer
    parts where they lie as it holds them.  ``dist_metas``, how the ranks lay that saved, is only checked.
    """
    if any(meta.used_zero for meta in redist_meta.param_meta.values()):
        get_dist_logger().warning(
            "redist cuts tensors as tensor-parallel ranks do; the flat parts of ZeRO (zero_start_dp_rank,"
            " zero_offsets) are found in them by load",
            ranks=[0],
        )
    known = redist_meta.param_meta

    def boxes(name: str, tensor: StoredTensor) -> list[Box]:
        return boxes_of_plan(name, tensor.shape, known[name]) if name in known else [whole(tensor.shape)]

    def check(manifest: Manifest) -> None:
        _check_names([known], manifest)
        _check_names(dist_metas, manifest)

    _rewrite(path, output_path, boxes, max_shard_size_gb, overwrite, backend, check)


def _rewrite(
    path: str | Path,
    output_path: str | Path,
    boxes: Callable[[str, StoredTensor], list[Box]],
    max_shard_size_gb: float,
    overwrite: bool,
    backend: str,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> None:
    _check_backend(backend)
    ranks = JobRanks()

    def collect() -> Contents:
        _check_target(output_path, overwrite)
        manifest = read_manifest(path)
        check(manifest)
        reader = RunReader(Path(path), manifest)
        reader.verify(ranks.rank, ranks.size)
        names: dict[str, list[str]] = {}
        for alias, name in manifest.ties.items():
            names.setdefault(name, []).append(alias)
        entries = [_entry(t, boxes, reader, names.get(t.name, [])) for t in manifest.tensors.values()]
        return Contents(entries, manifest.values, plan={**manifest.plan, "rewritten": True})

    Writer().save(collect, lambda values, parts: values, output_path, size_per_shard=_size(max_shard_size_gb))


def _entry(
    tensor: StoredTensor,
    boxes: Callable[[str, StoredTensor], list[Box]],
    reader: RunReader,
    aliases: list[str],
) -> HeldTensor:
    own = _parameter_of(tensor)
    param = None if own is None else reader.manifest.find(f"model/{own}")
    # states of another shape than their parameter stay whole, as all other tensors do
    cut = [whole(tensor.shape)]
    if own is not None and param is not None and param.shape == tensor.shape:
        cut = boxes(own, tensor)

    def read(box: Box) -> HeldBox:
        return HeldBox(box, lambda: reader.whole(tensor)[box.within(whole(tensor.shape))])

    return HeldTensor(tensor.name, tensor.shape, tensor.dtype, [read(box) for box in cut], aliases=aliases)


def _parameter_of(tensor: StoredTensor) -> str | None:
    """Return the name of the parameter that a stored tensor is, or is a state of; None for other tensors."""
    section, _, rest = tensor.name.partition("/")
    return {"model": rest, "optimizer": rest.rpartition("/")[0]}.get(section)


def _size(max_shard_size_gb: float) -> float:
    """Return the size of a file in MB."""
    if isinstance(max_shard_size_gb, str) or not max_shard_size_gb >= 0:
        raise ValueError(
            f"max_shard_size_gb is a number of GB, or 0 for files of any size; got {max_shard_size_gb!r}"
        )
    return max_shard_size_gb * 1024 or float("inf")


def _check_backend(backend: str) -> None:
    if backend != "disk":
        raise ValueError(f"checkpoints are written to and read from a disk, backend='disk'; got {backend!r}")


def _check_target(path: str | Path, overwrite: bool) -> None:
    folder = Path(path)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} is not empty; pass overwrite=True to replace the checkpoint in it")


def _check_states(
    model: nn.Module, optimizer: Optimizer | None, param_to_os: Mapping[str, int] | None
) -> None:
    if param_to_os is None:
        return
    if optimizer is None:
        raise ValueError("param_to_os describes the states of an optimizer; pass the optimizer too")
    names = {name for name, _ in user_module(model).named_parameters(remove_duplicate=False)}
    if unknown := [name for name in param_to_os if name not in names]:
        raise ValueError(f"param_to_os names {unknown[0]!r}, which the model does not have")


def _check_names(metas: Sequence[Mapping[str, Any]] | None, manifest: Manifest) -> None:
    stored = {f"model/{name}" for rank in metas or () for name in rank}
    if unknown := sorted(name for name in stored if manifest.find(name) is None):
        have = [name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")]
        raise ValueError(
            f"{unknown[0].removeprefix('model/')!r} is described, but the checkpoint has no such parameter;"
            f" it has {', '.join(have[:6])}{', ...' * (len(have) > 6)}"
        )


@contextmanager
def _described_everywhere(model: nn.Module, metas: Metas | None) -> Iterator[None]:
    """``described``, which all ranks refuse if one does."""
    with ExitStack() as stack:
        check_even(_together(JobRanks(), lambda: stack.enter_context(described(model, metas))))
        yield


def _together(ranks: JobRanks, do: Callable[[], Any]) -> list[Any]:
    """Return what all ranks return; fail on all ranks if one fails."""
    failure, value = None, None
    try:
        value = do()
    except Exception as error:
        failure = error
    return ranks.agree(failure, value, what="read the description of a checkpoint")


def _numbers(entries: Sequence[HeldTensor]) -> dict[tuple[str, Box], tuple[Numbers, float]]:
    """Return, of each box of a parameter that lies here, what tells it from another, and its rounding."""
    found = {}
    for entry in entries:
        if not entry.name.startswith("model/") or entry.by_first:
            continue
        eps = torch.finfo(entry.dtype).eps if entry.dtype.is_floating_point else 0.0
        for piece in entry.pieces:
            if isinstance(piece.tensor, Tensor) and not piece.tensor.is_meta:
                found[entry.name, piece.box] = project(piece.tensor), max(ROUNDING, eps)
    return found


def _check_copies(held: Sequence[Mapping[tuple[str, Box], tuple[Numbers, float]]]) -> None:
    """Refuse, on all ranks alike, parameters of which ranks hold the same elements with different values."""
    first: dict[tuple[str, Box], tuple[int, Numbers]] = {}
    for rank, boxes in enumerate(held):
        for key, (numbers, tolerance) in boxes.items():
            owner, expected = first.setdefault(key, (rank, numbers))
            if differ([expected, numbers], tolerance):
                name = key[0].removeprefix("model/")
                raise ValueError(
                    f"ranks {owner} and {rank} hold the same elements of the parameter {name!r}, of shape"
                    f" {key[1].sizes}, with different values, and only those of one rank would be saved. If"
                    " they are pieces of one parameter that the script has cut itself, describe them on"
                    f" each rank: dist_meta={{{name!r}: ParamDistMeta(dp_rank, dp_world_size, tp_rank,"
                    " tp_world_size, [dim], [tp_world_size])}. If they are copies, make them equal first"
                    " (dist.broadcast(parameter.data, 0)). If they are different parameters, give them"
                    " different names, or save each rank's model to a file of its own by torch.save"
                )
