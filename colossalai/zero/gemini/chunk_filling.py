"""How the parameters of a model get into their chunks, and what Gemini refuses about them.

A model that was built in the ordinary way gives its tensors away while its chunks are filled, one at a time;
all ranks take the values of the first rank.  So does one that was built without memory (``colossalai.lazy``):
the first rank computes the values of one parameter after the other, straight into its chunk.  A model on the
meta device has no values at all: they are drawn here, and depend on the seed and the parameter's name alone.

Parameters show what lies in their chunks.  What a script writes to them, or puts in their place, would be
lost with the next fetch; ``ParameterGuard`` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.amp._compat import changes
from colossalai.amp.casting import is_batch_norm
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.weights.deferred import Deferred, fill_beside_parameters, recording_of
from colossalai.mesh.weights.initial import give_storage, initial_values
from colossalai.mesh.weights.unfilled import become
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_manager import ChunkManager, first_ranks
from colossalai.zero.gemini.tiers import Tier
from colossalai.zero.pieces import IN_CHUNKS
from colossalai.zero.renormalizing import renormalizing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_model(module: Any, dtype: Any) -> None:
    """Refuse a model that cannot be put into chunks, before anything is changed or sent."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Gemini holds a torch.nn.Module, got {type(module).__name__}: {module!r}")
    if dtype not in DTYPES:
        raise ValueError(f"Gemini trains in {', '.join(map(str, DTYPES))}; got dtype={dtype!r}")
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise ValueError(
                f"Gemini averages gradients itself, but {name or 'the model'!r} is a DistributedDataParallel;"
                " give the model inside it"
            )
    if (problem := renormalizing(module, "which would be lost")) is not None:
        raise ValueError(problem)
    for name, param in module.named_parameters():
        if getattr(param, IN_CHUNKS, False):
            raise ValueError(
                f"{name!r} lies in chunks of another GeminiDDP already; go on with that one, or build a new"
                " model"
            )
        if (
            param.dtype is torch.float64 and dtype is torch.float32
        ):  # half precision is asked for, this is not
            raise ValueError(
                f"the parameter {name!r} is of torch.float64, and Gemini would train it in torch.float32,"
                " with half of its digits; call model.float() before if that is what you want, or use"
                " TorchDDPPlugin or LowLevelZeroPlugin(precision='fp32')"
            )


def check_shares(**shares: Any) -> None:
    """Refuse options that are not a share from 0 to 1."""
    for name, value in shares.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} is a share from 0 to 1, got {value!r}")


class ParameterGuard:
    """Notices changes to parameters that do not reach their chunks."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._slots = [(chunk, slot) for chunk in chunks.chunks for slot in chunk.slots]
        self._changes = [changes(slot.param) for _, slot in self._slots]
        self._frozen = [not slot.trained for _, slot in self._slots]
        for _, slot in self._slots:
            setattr(slot.param, IN_CHUNKS, True)

    def check(self) -> None:
        """Refuse a step if parameters were written to, replaced or unfrozen since their chunks were made."""
        for (chunk, slot), seen, frozen in zip(self._slots, self._changes, self._frozen, strict=True):
            param = slot.param
            if frozen and param.requires_grad:
                raise RuntimeError(
                    f"{slot.name!r} was frozen when its chunk was made, and is not any more; unfreeze"
                    " parameters before, or build the model again"
                )
            if param.data_ptr() != (slot.view if chunk.present else slot.blank).data_ptr():
                raise RuntimeError(
                    f"{slot.name!r} was given new memory (by model.to(...) or p.data = ...) after it was laid"
                    f" into {chunk.name}; move and cast the model before, and write weights by"
                    " load_state_dict"
                )
            if not chunk.resident and changes(param) != seen:
                raise lost_write(slot, chunk)


def lost_write(slot: ParamSlot, chunk: Chunk) -> RuntimeError:
    return RuntimeError(
        f"{slot.name!r} was written to in place, which does not reach {chunk.name}; write weights before, or"
        " by load_state_dict"
    )


def compare_keys(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Refuse weights of another model; return what torch returns about missing and unexpected names."""
    from torch.nn.modules.module import _IncompatibleKeys

    own = module.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    given = {n: tuple(state_dict[n].shape) for n in own if n in state_dict}
    problems = [
        f"{n} has shape {shape}, the model's is {tuple(own[n].shape)}"
        for n, shape in given.items()
        if shape != tuple(own[n].shape)
    ]
    if strict:
        problems += [f"missing: {', '.join(missing)}"] * bool(missing)
        problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if problems:
        raise RuntimeError(f"cannot load the weights of {type(module).__name__}: {'; '.join(problems)}")
    return _IncompatibleKeys(missing, unexpected)


Replaced = dict[nn.Parameter, nn.Parameter]


def give_meta_storage(module: nn.Module, device: torch.device) -> Replaced:
    """Replace parameters on the meta device by ones that can have memory; return these by the old ones."""
    params = list(module.named_parameters())
    empty = [(name, p) for name, p in params if p.is_meta]
    if not empty:
        return {}
    if len(empty) < len(params):
        full = next(name for name, p in params if not p.is_meta)
        raise ValueError(
            f"the parameter {empty[0][0]!r} is on the meta device, {full!r} is not; build all of the model"
            " under torch.device('meta'), to have it initialized here, or none of it"
        )
    replaced: Replaced = {}
    for _, p in empty:
        blank = torch.full((), float("nan"), dtype=p.dtype, device=device)
        replaced[p] = give_storage(module, p, blank.expand(p.shape))
    return replaced


Pending = dict[nn.Parameter, Callable[[], Tensor]]


def take_deferred(module: nn.Module, device: torch.device) -> Pending:
    """Let parameters that were built without memory wait for their chunks: return what computes the values of
    each.
    """
    fill_beside_parameters(module)
    found = [(p, recording) for p in module.parameters() if (recording := recording_of(p)) is not None]
    return {p: _take(p, recording, device) for p, recording in found}


def _take(param: nn.Parameter, recording: Deferred, device: torch.device) -> Callable[[], Tensor]:
    values = recording.pending(param)
    blank = torch.full((), float("nan"), dtype=param.dtype, device=device)
    become(param, blank.expand(param.shape))
    return values


def register(module: nn.Module, chunks: ChunkManager, dtype: torch.dtype) -> None:
    """Register all parameters with chunks, in the order in which the model made them."""
    exact = {p for m in module.modules() if is_batch_norm(m) for p in m.parameters(recurse=False)}
    for name, param in module.named_parameters():
        if not param.is_floating_point():
            raise TypeError(f"chunks hold floating-point parameters; {name!r} is of {param.dtype}")
        chunks.register(param, name, torch.float32 if param in exact else dtype)
    chunks.close_all_groups()


def fill(
    module: nn.Module,
    chunks: ChunkManager,
    home: Callable[[Chunk], Tier],
    *,
    seed: int | None,
    mesh: Mesh | None,
    pending: Pending,
) -> None:
    """Allocate and fill all chunks, with values drawn with ``seed``, or, if it is None, the parameters'."""
    values = (
        initial_values(module, seed, mesh, chunks.device)
        if seed is not None
        else _own_values(module, pending, chunks)
    )
    chunks.lay_in(values, home, alike=seed is not None)


def _own_values(
    module: nn.Module, pending: Pending, chunks: ChunkManager
) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """Every parameter with its values, or None where they come from the first rank."""
    for p in module.parameters():
        ranks = chunks.get_chunk(p).ranks
        if p not in pending:
            yield p, p.data  # of a ColoParameter, its piece
        elif ranks.size > 1 and ranks.rank > 0:
            yield p, None
        else:
            yield p, pending[p]()


def place_buffers(module: nn.Module, chunks: ChunkManager, dtype: torch.dtype) -> None:
    """Move the buffers of ``module``, with the first rank's values, to the compute device."""
    for owner in module.modules():
        keep = is_batch_norm(owner)
        for name, buffer in owner.named_buffers(recurse=False):
            keeps = keep or (
                buffer.dtype is torch.float64 and dtype is torch.float32
            )  # in the serial model it stays
            wanted = dtype if buffer.is_floating_point() and not keeps else buffer.dtype
            owner._buffers[name] = first_ranks(buffer.to(chunks.device, wanted), chunks.ranks)
