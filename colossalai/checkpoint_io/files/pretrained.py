"""Weights of a whole model read into a model that is cut: every rank reads its own pieces, and nothing else.

A safetensors file tells where each tensor lies and is mapped into memory, so only the piece that is copied is
read from it; at no time does a rank hold more of a tensor than its piece.  The model may be on the meta
device: it gets its memory here.

A model may also be a stage of a pipeline, or several.  A stage knows the names of the whole model, so what
belongs to other stages is passed over, and a weight that is tied to one of theirs is read under either name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.checkpoint_io.files.io import GatheredCheckpointIO, whole_state
from colossalai.checkpoint_io.files.sharding import CheckpointIndexFile, get_base_filenames
from colossalai.checkpoint_io.files.state_file import stored_names
from colossalai.checkpoint_io.files.stored_tensors import (
    JoinedTensor,
    Joins,
    PretrainedTensor,
    Source,
    StoredFiles,
    joined_names,
)
from colossalai.checkpoint_io.held_tensors import is_dtensor, is_piece, serial_shape
from colossalai.checkpoint_io.model_state import ModelState, mesh_of
from colossalai.checkpoint_io.room import fill_buffers, write
from colossalai.checkpoint_io.runs.manifest import latest
from colossalai.checkpoint_io.runs.weights import load_run_weights
from colossalai.interface import ModelWrapper, below_compile, user_module
from colossalai.mesh import Layout, Mesh, local_slices, placement, serial_form
from colossalai.mesh.weights.deferred import materialize
from colossalai.nn.policies.cutting.adapters import base_of
from colossalai.nn.policies.stages.stage import ModelStage, StageList, adapted_too_late
from colossalai.nn.policies.stages.stand_ins import empty_copy
from colossalai.nn.policies.wrap_forward import native_class
from colossalai.utils import get_current_device

M = TypeVar("M", bound=nn.Module)
ADAPTERS = "adapter_model.safetensors"
"""The file in which PEFT stores adapters."""


def load_pretrained(
    model: M,
    path: str | Path,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
) -> M:
    """Fill ``model`` with the weights in ``path`` and return it.

    ``path`` is a safetensors file, a folder as ``save_pretrained`` writes it (``model.safetensors``, or
    shards with an index), or a checkpoint of ``booster.save``; of a folder of these it is the latest.  Of a
    model with adapters of PEFT, a folder with adapters fills the active one.
    ``model`` may be what ``colossalai.pipeline.split_model`` returns.  What is on the meta device gets memory
    on ``device``, by default the current one.  With ``strict=False`` tensors that
    only one side has are passed over; those on the meta device must be there.  ``mesh`` is that on which the
    model was cut, and found without being given.

    All is compared before anything is read; nothing is communicated.
    """
    path = Path(path)
    stages = _stages(model)
    if not _is_pretrained(path) and (run := latest(path)) is not None:
        for stage in stages:
            load_run_weights(stage, run, strict=strict, device=torch.device(device or get_current_device()))
        return model
    own = {name: tensor for s in stages for name, tensor in s.state_dict(keep_vars=True).items()}
    stored = _stored(path, stages[0])
    adapters = _adapter_names(stages[0]) if path / ADAPTERS in stored.values() else {}
    if adapters:  # what is in the base model stays as it is
        named = {*adapters.values(), *stored}
        own = {name: tensor for name, tensor in own.items() if name in named}
    sources, unknown = _assign(stages[0], own, stored, adapters)
    _check(stages[0], path, own, sources, unknown if strict else [], strict)
    mesh = mesh or mesh_of(model)
    device = torch.device(device or get_current_device())
    for target, value in _pieces(own, sources, mesh):
        write(model, target, value, device)
    for stage in stages:
        materialize(stage)
        fill_buffers(stage, device)
    return model


def read_pretrained(
    model: nn.Module, path: str | Path, *, strict: bool = True, mesh: Mesh | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored values of ``model``, one tensor at a time: this rank's piece where the model is cut.

    For models that keep their weights in a way of their own, such as ``GeminiDDP`` (give its ``unwrap()``):
    at no time is there more than one tensor.  A tied weight comes once.  Otherwise as ``load_pretrained``.
    """
    path = Path(path)
    own = dict(model.state_dict(keep_vars=True))
    sources, unknown = _assign(model, own, _stored(path, model), {})
    _check(model, path, own, sources, unknown if strict else [], strict)
    names = {id(tensor): name for name, tensor in reversed(own.items())}
    for target, value in _pieces(own, sources, mesh or mesh_of(model)):
        yield names[id(target)], value


def _stages(model: nn.Module) -> Sequence[nn.Module]:
    """The stages of one model that ``model`` is a list of; any other model itself."""
    inner = list(model) if isinstance(model, nn.ModuleList) else []
    return inner if inner and all(isinstance(stage, ModelStage) for stage in inner) else [model]


def _is_pretrained(path: Path) -> bool:
    """Whether ``path`` is a file, or a folder with weights in the layout of Hugging Face."""
    names = (ADAPTERS, *get_base_filenames(use_safetensors=True))
    return path.is_file() or any((path / name).is_file() for name in names)


def _stored(path: Path, model: nn.Module) -> dict[str, Path]:
    """The file of every stored tensor."""
    if path.is_file():
        return dict.fromkeys(stored_names(path), path)
    if (adapters := path / ADAPTERS).is_file() and hasattr(model, "peft_config"):
        return dict.fromkeys(stored_names(adapters), adapters)
    single, index = (path / name for name in get_base_filenames(use_safetensors=True))
    if index.is_file():
        return {name: path / file for name, file in CheckpointIndexFile.from_file(index).weight_map.items()}
    if single.is_file():
        return dict.fromkeys(stored_names(single), single)
    if adapters.is_file():
        raise ValueError(
            f"{path} holds adapters of PEFT, and this {type(model).__name__} has none; open them by"
            " PeftModel.from_pretrained(model, path) before the model is cut"
        )
    pickle = min((file.name for file in path.glob("*.bin")), default=None)
    more = f"; pickles such as {pickle} become that by: colossalai ckpt convert {path} NEW_FOLDER"
    raise FileNotFoundError(
        f"{path} is neither a safetensors file nor a folder with {single.name} or {index.name}"
        f"{more if pickle else ''}"
    )


def _adapter_names(model: Any) -> dict[str, str]:
    """The names in ``model`` of the tensors of its active adapter, by those under which PEFT stores them."""
    from peft import get_peft_model_state_dict

    whole = empty_copy(model)
    active = getattr(model, "active_adapter", None)
    chosen = active if isinstance(active, str) else next(iter(model.peft_config))
    names: Any = {name: name for name in whole.state_dict()}
    found = get_peft_model_state_dict(whole, names, chosen, save_embedding_layers=False)
    # a model of transformers with add_adapter stores them as those of a PeftModel
    prefix = "base_model.model." if base_of(model) is model else ""
    return {prefix + stored: name for stored, name in found.items()}


def _assign(
    model: nn.Module, own: dict[str, Tensor], stored: dict[str, Path], adapters: dict[str, str]
) -> tuple[dict[str, Source], list[str]]:
    """What is stored for each name of the model, and the stored names that the model does not know."""
    known = _known(model, own)
    rename, joins = _renaming(model, known)
    if adapters:
        rename, joins = lambda name: adapters.get(name, name), None
    sources: dict[str, Source] = {}
    joined: dict[str, JoinedTensor] = {}
    unknown = []
    for name, file in stored.items():
        to = name if name in known and name not in adapters else rename(name)
        if to not in known and joins is not None and (part := joins(name)) is not None:
            whole = joined.setdefault(part.target, JoinedTensor(part.blocks))
            whole.parts[part.number, part.block] = PretrainedTensor(file, name)
            to = part.target
        elif to in known:
            _fill(sources, known[to], own, PretrainedTensor(file, name))
        if to not in known:
            unknown.append(name)
    for to, whole in joined.items():
        if whole.rows is not None:
            _fill(sources, known.get(to, ()), own, whole)
    return sources, unknown


def _fill(sources: dict[str, Source], targets: Iterable[str], own: dict[str, Tensor], source: Source) -> None:
    for target in targets:
        if target in own:
            sources.setdefault(target, source)


def _known(model: nn.Module, own: dict[str, Tensor]) -> Mapping[str, tuple[str, ...]]:
    """The names that a file may have, and for each those of the model's state that it fills."""
    if isinstance(model, ModelStage):
        return model.share.names
    # buffers that are not saved any more: older files have them
    return {**{name: () for name, _ in model.named_buffers()}, **{name: (name,) for name in own}}


def _renaming(
    model: nn.Module, known: Mapping[str, Any]
) -> tuple[Callable[[str], str], Callable[[str], Joins | None] | None]:
    """How transformers finds the tensors of files with older names, or of a model with or without a head, and
    those that files hold in parts.
    """
    prefix = getattr(model, "base_model_prefix", None)
    if not prefix:
        return lambda name: name, None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    names = [change for change in changes if isinstance(change, WeightRenaming)]

    def rename(name: str, converters: list[Any]) -> tuple[str, str | None]:
        return rename_source_key(name, names, converters, prefix, dict(known))

    converters = [change for change in changes if isinstance(change, WeightConverter)]
    return lambda name: rename(name, [])[0], joined_names(converters, rename)


def _check(
    model: nn.Module,
    path: Path,
    own: dict[str, Tensor],
    sources: dict[str, Source],
    unknown: list[str],
    strict: bool,
) -> None:
    there = {id(own[name]) for name in sources}
    missing = [name for name, tensor in own.items() if id(tensor) not in there and (strict or tensor.is_meta)]
    shapes = []
    with StoredFiles() as files:
        for name, source in sources.items():
            found = tuple(files.part(source).get_shape())
            if found != (wanted := serial_shape(own[name])):
                shapes.append(f"{name} is {found} there and {wanted} in the model")
    faults = [("it lacks", missing), ("the model does not know", unknown), ("sizes differ:", shapes)]
    if any(names for _, names in faults):
        details = "; ".join(f"{what} {', '.join(names)}" for what, names in faults if names)
        hint = ". Pass strict=False to pass over what only one side has" if strict and not shapes else ""
        raise RuntimeError(f"{path} does not fit {type(model).__name__}: {details}{hint}")


def _pieces(
    own: dict[str, Tensor], sources: dict[str, Source], mesh: Mesh | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor of the model that is stored, once, with this rank's piece of its values."""
    done: set[int] = set()
    order = {file: place for place, file in enumerate(dict.fromkeys(s.file for s in sources.values()))}
    with StoredFiles() as files:
        for name, source in sorted(sources.items(), key=lambda item: order[item[1].file]):
            if id(own[name]) not in done:
                done.add(id(own[name]))
                yield own[name], _read(files, source, own[name], mesh)


def _read(files: StoredFiles, source: Source, target: Tensor, mesh: Mesh | None) -> Tensor:
    """This rank's piece of what is stored, laid out like ``target``."""
    layout = placement(target)
    if not layout.sharded:
        return serial_form(files.whole(source), target)
    if mesh is None:
        raise ValueError(
            f"{source.name} is cut as {layout}: load_pretrained needs mesh=, as no layer of this model has"
            " one"
        )
    as_stored: Layout = layout.transposed() if getattr(target, "transposed", False) else layout
    ranges = local_slices(serial_shape(target), as_stored, mesh, uneven=True)
    return serial_form(_take(files.part(source), (), ranges), target)


def _take(stored: Any, chosen: tuple[slice, ...], ranges: tuple[tuple[tuple[int, int], ...], ...]) -> Tensor:
    """The product of ``ranges``, of which a dim with fused blocks has several."""
    if not ranges:
        return stored[chosen]
    pieces = [_take(stored, (*chosen, slice(a, a + n)), ranges[1:]) for a, n in ranges[0]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, len(chosen))


def save_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write the whole of ``model`` as its own ``save_pretrained`` does, so that ``from_pretrained`` opens it.

    ``model`` is what ``boost``, ``parallelize`` or ``split_model`` returned, or a model without a plan.
    Every rank calls this, under every plan; rank 0 brings the model together on its CPU and writes it, and
    the others wait until it is written, or raise if that fails.  ``options`` are those of the model's own
    method, such as ``max_shard_size``; with a ``state_dict`` among them, rank 0 writes that, if all of the
    model is in it.
    """
    model = _below_wrappers(model)
    options.pop("is_main_process", None)  # the one that writes has all of it
    user = user_module(model)
    if (problem := adapted_too_late(user)) is not None:
        raise ValueError(f"save_pretrained: {problem}")
    native = native_class(_first_stage(user))
    if not callable(getattr(native, "save_pretrained", None)):
        raise TypeError(
            "save_pretrained needs a model that has this method, as those of transformers do; got a"
            f" {native.__name__}. booster.save_model(model, path) writes the weights of any"
            " model"
        )
    if is_spread(model):
        _write_gathered(model, folder, options)
    else:
        GatheredCheckpointIO().run_write(lambda: _own_method(user)(folder, **options))


def save_boosted(model: ModelWrapper, save_directory: Any, **options: Any) -> None:
    """``model.save_pretrained`` of a boosted model.

    Where this process holds all of the model, it writes alone, so that a script may call it on one rank;
    elsewhere as ``save_pretrained``.
    """
    if is_spread(model):
        save_pretrained(model, save_directory, **options)
    else:
        _own_method(model.unwrap())(save_directory, **options)


def _own_method(user: nn.Module) -> Any:
    return partial(native_class(user).save_pretrained, user)


def _below_wrappers(model: nn.Module) -> nn.Module:
    """What a script has put torch's own wrappers around."""
    model = below_compile(model)
    return below_compile(model.module) if isinstance(model, DistributedDataParallel) else model


def _first_stage(user: nn.Module) -> nn.Module:
    return user[0] if isinstance(user, nn.ModuleList) and len(user) else user


def _write_gathered(model: nn.Module, folder: Any, options: dict[str, Any]) -> None:
    """Let the first rank write what all ranks hold together, or the ``state_dict`` among ``options``."""
    user, io = user_module(model), GatheredCheckpointIO()
    if isinstance(model, nn.ModuleList):
        model = StageList(model)  # knows the names of the whole model
    if "state_dict" not in options:
        parts = io.model_parts(model, float("inf"))
        io.run_write(lambda: write_pretrained(user, folder, dict(whole_state(parts, model)), options), parts)
        return
    state = options.pop("state_dict")
    wanted = io.ranks.gather(
        [(*entry.aliases, entry.name, entry.shape) for entry in ModelState(model, "").entries()]
    )

    def write() -> None:
        _check_whole(state, [weight for weights in wanted for weight in weights])
        write_pretrained(user, folder, state, options)

    io.run_write(write)


def _check_whole(state: Mapping[str, Any], wanted: Iterable[tuple[Any, ...]]) -> None:
    """Refuse a state that lacks a weight of the model.

    Each of ``wanted`` has the names of a weight, and its shape in the serial model.
    """
    lost = {
        names[-1].removeprefix("/"): None
        for *names, shape in wanted
        if not any(_is_whole(state.get(name.removeprefix("/")), shape) for name in names)
    }
    if lost:
        raise ValueError(
            f"save_pretrained(..., state_dict=...): {len(lost)} weights of the model are not in the"
            " state_dict of the first rank, or"
            f" only pieces of them (the first: {next(iter(lost))}). Leave out state_dict, and the whole model"
            " is written; another dtype is given"
            " when it is loaded (from_pretrained(..., dtype=...))"
        )


def _is_whole(value: Any, shape: tuple[int, ...]) -> bool:
    return value is not None and tuple(value.shape) == tuple(shape) and not is_dtensor(value)


def push_to_hub(model: ModelWrapper, *args: Any, **options: Any) -> Any:
    """Refuse for a model that is spread, since the model's own method looks at what one process holds."""
    if is_spread(model):
        raise RuntimeError(
            f"push_to_hub would upload what this process holds of the model, which {type(model).__name__} has"
            " spread; call"
            " model.save_pretrained(folder, push_to_hub=True, repo_id=...) on every rank"
        )
    user: Any = model.unwrap()
    return user.push_to_hub(*args, **options)


def is_spread(model: nn.Module) -> bool:
    """Whether this process holds less than the model's own method would write."""
    user = user_module(model)
    stages = list(user) if isinstance(user, nn.ModuleList) else [user]
    has_stages = any(isinstance(stage, ModelStage) for stage in stages)
    held = model.holdings() if isinstance(model, ModelWrapper) else []
    return has_stages or bool(held) or any(is_piece(p) for p in user.parameters())


def write_pretrained(user: nn.Module, folder: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Write ``state`` by the model's own ``save_pretrained``; ``user`` may be a list of its stages."""
    first: Any = _first_stage(user)
    if hasattr(first, "peft_config"):
        first = empty_copy(first)  # PEFT asks modules for the names of what is in them
    native = native_class(first)
    if "state_dict" in inspect.signature(native.save_pretrained).parameters:
        native.save_pretrained(first, folder, state_dict=state, **options)
        return
    first.__dict__["state_dict"] = lambda *_, **__: state  # what such a method asks for
    try:
        native.save_pretrained(first, folder, **options)
    finally:
        del first.__dict__["state_dict"]


ModelWrapper.methods.update(save_pretrained=save_boosted, push_to_hub=push_to_hub)
