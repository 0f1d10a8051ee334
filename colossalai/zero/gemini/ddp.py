"""``GeminiDDP``: a model whose weights lie in chunks, wherever there is room for them.

It is called like the model.  Weights are fetched to the compute device when a module needs them; gradients
are averaged over the data-parallel ranks chunk by chunk while the backward pass goes on; ``GeminiOptimizer``
updates each chunk where it rests.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from colossalai.amp.casting import cast_floats
from colossalai.checkpoint_io.files.sharding import MB, calculate_tensor_size, plan_shards
from colossalai.checkpoint_io.ranks import FromFirst, JobRanks
from colossalai.interface import ModelWrapper
from colossalai.interface.arguments import Copies
from colossalai.interface.holding import Holding, RestingPlace
from colossalai.mesh import Mesh, own_grad, unshard
from colossalai.tensor import ColoTensor
from colossalai.tensor.colo_tensor import cut_dim
from colossalai.tensor.serialization import user_attributes
from colossalai.utils.lazy_tensor import lazy_tensor
from colossalai.zero.absent_tensors import REASON, KeptGradients, away_class, why_no_gradient
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_filling import (
    ParameterGuard,
    Replaced,
    check_model,
    compare_keys,
    fill,
    give_meta_storage,
    place_buffers,
    register,
    take_deferred,
)
from colossalai.zero.gemini.chunk_manager import ChunkManager, data_ranks, init_chunk_manager
from colossalai.zero.gemini.chunk_search import model_mesh, roomier_chunks
from colossalai.zero.gemini.hooks import ModuleHooks, without_hooks
from colossalai.zero.gemini.manager import ChunkOptimizer, GeminiManager
from colossalai.zero.gemini.placement import MemStats, PlacementPolicyFactory
from colossalai.zero.pieces import IN_CHUNKS, FlatLayout
from colossalai.zero.states import SlicedTensor


class VisibleGradients:
    """What a script sees as ``p.grad`` of a model in chunks, see ``colossalai.zero.absent_tensors``."""

    def __init__(self, model: ZeroDDP) -> None:
        self._model, self._chunks = weakref.ref(model), model.chunk_manager
        self._of = model.gradients.of
        self._name = type(model).__name__
        slots = [slot for chunk in self._chunks.chunks for slot in chunk.slots]
        self.kept = KeptGradients(self, [slot.param for slot in slots if slot.trained])
        away: dict[type, type] = {}
        for slot in slots:
            if slot.trained:
                slot.native = self.kept.class_of(slot.native)
            if slot.native not in away:
                away[slot.native] = away_class(slot.native)
            slot.away = away[slot.native]
        for chunk in self._chunks.chunks:
            chunk.guard()

    def keeps_gradient(self, param: Tensor) -> bool:
        found = cast(nn.Parameter, param)
        state, slot = self._of[self._chunks.get_chunk(found).index], self._chunks.get_slot(found)
        model = self._model()
        used_up = model is not None and model.optimizer is not None and model.optimizer.used_up(found)
        return used_up or state.has(slot) or own_grad(param) is not None

    def shown_gradient(self, param: Tensor) -> Tensor | None:
        return None

    def why_no_gradient(self, param: Tensor) -> str:
        return why_no_gradient(repr(self._chunks.get_slot(cast(nn.Parameter, param)).name), self._name)

    def zero_grad(self) -> None:
        if (model := self._model()) is not None:
            model.zero_grad()


class ZeroDDP(ModelWrapper):
    """A model whose weights lie in the chunks of ``gemini_manager``.

    Args:
        force_outputs_fp32: floating-point outputs are cast to float32.
        strict_ddp_mode: chunks stay whole on the compute device from the forward pass to the end of the
            backward pass.
        scatter_after_inference: after a forward pass without gradients, evict chunks that have a home
            elsewhere.
        dtype: of weights, gradients and computation; running statistics and weights of batch normalization
            stay float32.
        seed: of the initial values of a model on the meta device.
    """

    releases_weights = True  # between the passes of a module: no pass may come in parts

    def __init__(
        self,
        module: nn.Module,
        gemini_manager: GeminiManager,
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        scatter_after_inference: bool = True,
        *,
        dtype: torch.dtype = torch.float16,
        mesh: Mesh | None = None,
        seed: int = 1024,
    ) -> None:
        check_model(module, dtype)
        super().__init__(module)
        self.gemini_manager, self.chunk_manager = gemini_manager, gemini_manager.chunk_manager
        self.dtype, self.mesh = dtype, mesh if mesh is not None else model_mesh(module)
        self.force_outputs_fp32 = force_outputs_fp32
        self.scatter_after_inference = scatter_after_inference
        self.chunk_manager.take(self.unwrap())
        self.chunk_manager.share_with(self.mesh)
        gemini_manager.strict = strict_ddp_mode or self.chunk_manager.keep_gathered
        if not pin_memory:
            self.chunk_manager.host.pinned = False
        user = self.unwrap()
        pending = take_deferred(user, self.chunk_manager.device)
        self.replaced: Replaced = give_meta_storage(user, self.chunk_manager.device)
        register(user, self.chunk_manager, dtype)
        if self.chunk_manager.reader is not None:
            self.chunk_manager.reader.buffers.fit(max(c.shard_nbytes for c in self.chunk_manager.chunks))
            memory = gemini_manager.gradients.memory
            memory.spilled.reserve(memory.host.largest)
        fill(
            user,
            self.chunk_manager,
            gemini_manager.first_home,
            seed=seed if self.replaced else None,
            mesh=self.mesh,
            pending=pending,
        )
        place_buffers(user, self.chunk_manager, dtype)
        self.gradients = gemini_manager.gradients
        self.gradients.start(chunk for chunk in self.chunk_manager.chunks if chunk.trained)
        self.optimizer: ChunkOptimizer | None = None
        self.shown = VisibleGradients(self)
        self._guard = ParameterGuard(self.chunk_manager)
        self._hooks = ModuleHooks(user, gemini_manager, self._take_gradient, self._end_backward)

    keeps_parameters = True

    def attach(self, optimizer: ChunkOptimizer) -> None:
        """Let ``optimizer`` update the chunks."""
        self.optimizer = self.gemini_manager.optimizer = optimizer

    # Training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and self.training and not self._hooks.in_backward
        if not self._hooks.in_backward:
            self._roll_back()
            self.gemini_manager.evict_stale()
        if trains:
            self._guard.check()
            self.shown.kept.check()
            self.gemini_manager.pre_iter()
        if self.gemini_manager.strict and not self._hooks.in_backward:
            self.gemini_manager.fetch_all()
        passed = cast_floats((args, kwargs), self.dtype)
        copies = Copies((args, kwargs), passed)
        asked = self.gemini_manager.agreement.asked
        try:
            output = self.module(*passed[0], **passed[1])
            if not self._hooks.in_backward:
                self.gemini_manager.end_forward(asked, torch.is_grad_enabled())
        except BaseException:
            self._hooks.reset()
            raise
        self._hooks.watch((output, copies.hand_back()))
        if not torch.is_grad_enabled() and self.scatter_after_inference and not self._hooks.in_backward:
            self.gemini_manager.evict_all()
        return cast_floats(output, torch.float32) if self.force_outputs_fp32 else output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``."""
        try:
            loss.backward(*args, **kwargs)
        except BaseException:
            self._hooks.reset()
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to this rank's gradients; the next pass outside averages them."""
        before, self.gradients.sync = self.gradients.sync, False
        try:
            yield
        finally:
            self.gradients.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; updates that a step has asked for own theirs."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)  # which calls the following
        else:
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the gradients that the chunks have."""
        self._roll_back()
        self.shown.kept.forget()
        if self.optimizer is not None:
            self.optimizer.gradients_cleared()
        self.gradients.clear()

    @property
    def is_in_backward(self) -> bool:
        return self._hooks.in_backward

    def _roll_back(self) -> None:
        """Roll back speculative updates that no step has accepted."""
        if self.optimizer is not None:
            self.optimizer.roll_back()

    def _take_gradient(self, chunk: Chunk, slot: ParamSlot) -> None:
        if self.optimizer is not None:
            self.optimizer.check_cleared()
        gradients = self.gradients
        if slot in gradients.tied.slots:
            gradients.tied.keep(slot)
            self._hooks.gradient_taken(slot)
            return
        gradients.add(chunk, slot)
        self._hooks.gradient_taken(slot)
        if gradients.is_complete(chunk):
            if self.gemini_manager.is_warmup():
                gradients.done_order.append(chunk.index)
            self._sent(gradients.reduce_complete(chunk))

    def _sent(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.gemini_manager.timeline.note("grads", chunk)
            if self.optimizer is not None:
                self.optimizer.gradients_reduced(chunk)
            self.gemini_manager.evict_if_done(chunk)

    def _end_backward(self) -> None:
        self._sent(self.gradients.finish())
        self.gemini_manager.post_iter()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} lies in chunks on several ranks and tiers, so it cannot be copied or"
            " pickled; use state_dict(), or get_static_torch_model(model) for an ordinary copy; an average of"
            " the weights is one of model.state_dict() (docs/source/en/booster.md)"
        )

    # Weights

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Inside, all parameters are on the compute device and can be read.

        The next step refuses what was written to a parameter that does not rest there.
        """
        self.settle()
        self.gemini_manager.begin_look()
        chunks = [c for c in self.chunk_manager.chunks if not c.resident]
        slots = [slot for chunk in chunks for slot in chunk.slots]
        user = object()
        self.gemini_manager.access(chunks, slots, user, "whole_parameters()")
        try:
            yield
        finally:
            self.gemini_manager.release(chunks, slots, user)

    def settle(self) -> None:
        """Wait until all updates that a step has asked for are done."""
        if self.optimizer is not None:
            self.optimizer.settle()
        self.gemini_manager.worker.wait_all()
        self.gemini_manager.evict_stale()

    @torch.no_grad()
    def whole_values(
        self, dtype: torch.dtype | None = None, everywhere: bool = True
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the name and the values, on the CPU of the first rank or ``everywhere``, of every parameter.

        The other ranks, which take part in gathering, get None for the values.
        """
        for chunk, layout, index, own in self._own_parts():
            slot = chunk.slots[index]
            sources = layout.owners(index)
            sliced = SlicedTensor(slot.shape, chunk.dtype, own, sources, chunk.ranks.gather)
            whole = sliced.gathered(everywhere=everywhere)
            yield slot.name, None if whole is None else whole.to(dtype or chunk.dtype)

    def state_dict(  # type: ignore[override]
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = True,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the weights under the names of the model, on the CPU of the first rank, or of all.

        Every rank must call it.  ``dtype`` is that of the parameters by default.  Ranks that get nothing
        return an empty dict.
        """
        if only_rank_0:
            self._refuse_first_alone("state_dict")
        values = dict(self.whole_values(dtype, not only_rank_0))
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        if only_rank_0 and self.chunk_manager.ranks.rank:
            return found
        # a layer that the user has put into the model since has names of old, and values of its own
        named = self.unwrap().named_parameters()
        names = {id(p): name for name, p in named if self.chunk_manager.holds(p)}
        for name, tensor in self.unwrap().state_dict(keep_vars=True).items():
            own = values[names[id(tensor)]] if id(tensor) in names else tensor.detach().cpu()
            found[prefix + name] = own
        return found

    def state_dict_shard(
        self,
        prefix: str = "",
        keep_vars: bool = False,
        max_shard_size: float = 1024,
        only_rank_0: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Iterator[OrderedDict[str, Any]]:
        """Yield ``state_dict`` in parts of at most ``max_shard_size`` MB, each gathered when it is asked for.

        A part with one tensor may be larger.  Every rank must ask for all parts; ranks that keep nothing get
        empty ones.  Values are copies, whatever ``keep_vars`` says.
        """
        if only_rank_0:
            self._refuse_first_alone("state_dict_shard")
        return state_shards(self, prefix, max_shard_size, not only_rank_0, dtype)

    def _refuse_first_alone(self, who: str) -> None:
        if self.chunk_manager.has_pieces:
            raise ValueError(
                f"{who}(only_rank_0=True) of a model whose experts lie on different ranks would leave out"
                " those of all ranks but the first; save by booster.save_model, which puts them together, or"
                " pass only_rank_0=False, for which each rank gets its own"
            )

    def holdings(self) -> list[Holding]:
        found = []
        for chunk, layout, index, own in self._own_parts():
            start, end = layout.piece(index, chunk.ranks.rank)
            found.append(
                Holding(chunk.slots[index].param, chunk.shard[:0] if own is None else own, start, end)
            )
        return found

    def resting_places(self) -> dict[int, RestingPlace]:
        found = super().resting_places()
        for chunk in self.chunk_manager.chunks:
            layout = chunk.layout()
            for index, slot in enumerate(chunk.slots):
                start, end = layout.piece(index, chunk.ranks.rank)
                found[id(slot.param)] = RestingPlace(
                    numel=end - start,
                    dtype=chunk.dtype,
                    tier=chunk.home.name if chunk.home is not None else "-",
                    words=f"in chunk {chunk.index}, which {chunk.ranks.size} ranks share",
                )
        return found

    def _own_parts(self) -> Iterator[tuple[Chunk, FlatLayout, int, Tensor | None]]:
        """Yield for every parameter its chunk, the layout of that, its number there, and this rank's part.

        Every rank must call it, as all of them wait for each other first.
        """
        self.settle()
        self.gemini_manager.begin_look()
        read = lru_cache(maxsize=1)(self.chunk_manager.read_shard)  # slots are asked for one after the other
        for chunk in self.chunk_manager.chunks:
            layout = chunk.layout()
            for index, slot in enumerate(chunk.slots):
                yield chunk, layout, index, self._own_part(chunk, slot, read)

    def weights_loaded(self, elsewhere: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        for param, part in elsewhere:
            self._write_part(param, part)
        self.gemini_manager.evict_all()

    def _own_part(self, chunk: Chunk, slot: ParamSlot, read: Callable[[Chunk], Tensor]) -> Tensor | None:
        part = chunk.own_part(slot)
        if part is None or not self.chunk_manager.is_on_disk(chunk):
            return part
        return lazy_tensor(part.shape, part.dtype, lambda: chunk.own_part(slot, read(chunk)))

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors under the names of the model; every rank must call it.

        Each rank takes the values of its own shards from its own dict.  Ranks whose dict is empty, as
        ``state_dict`` returns it on all but the first, take those of the first rank.
        """
        self.settle()
        state_dict = self._given_to_all(state_dict)
        result = compare_keys(self.unwrap(), state_dict, strict)
        names: dict[nn.Parameter, str] = {}  # of tied weights, the last one
        for name, tensor in self.unwrap().state_dict(keep_vars=True).items():
            if name not in state_dict:
                continue
            if isinstance(tensor, nn.Parameter) and self.chunk_manager.holds(tensor):
                names[tensor] = name
            else:
                tensor.copy_(state_dict[name])
        for param, name in names.items():
            self.write(param, state_dict[name])
        self.gemini_manager.evict_all()
        return result

    def _given_to_all(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.chunk_manager.ranks.size == 1:
            return state_dict
        ranks = JobRanks(self.chunk_manager.ranks.gather)
        have = ranks.gather(bool(state_dict))
        if not have[0] or all(have):
            return state_dict
        if self.chunk_manager.has_pieces:
            raise ValueError(
                "load_state_dict got weights on some ranks alone, but ranks hold different experts; pass each"
                " rank its own, or load by booster.load_model"
            )
        return FromFirst(ranks, state_dict)

    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Write ``value`` to ``param``, at the home of its chunk."""
        chunk, slot = self.chunk_manager.get_chunk(param), self.chunk_manager.get_slot(param)
        own = chunk.own_part(slot)
        if own is None:
            return
        start = max(chunk.own.start - slot.offset, 0)
        self._write_part(param, value.detach().reshape(-1)[start : start + own.numel()])

    @torch.no_grad()
    def _write_part(self, param: Any, part: Tensor) -> None:
        """Write ``part``, the elements of ``param`` that this rank's shard holds."""
        chunk, slot = self.chunk_manager.get_chunk(param), self.chunk_manager.get_slot(param)
        if self.optimizer is not None and self.optimizer.write(slot, part):
            return
        on_disk = self.chunk_manager.is_on_disk(chunk)
        with self.chunk_manager.edited(chunk) if on_disk else nullcontext(chunk.shard) as shard:
            place = chunk.own_part(slot, shard)
            assert place is not None
            place.copy_(part)


class GeminiDDP(ZeroDDP):
    """Puts ``module`` into chunks of the size that wastes least, under a placement policy.

    Args:
        device: where the model computes; by default the current GPU, or the CPU.
        placement_policy: ``"cpu"``, ``"cuda"``, ``"auto"`` or ``"const"``; see
            ``colossalai.zero.gemini.placement``.
        pin_memory: page-locked host memory, for copies that overlap with computation; has a meaning with a
            GPU only.
        search_range_mb, hidden_dim, min_chunk_size_mb: the search for the chunk size: how far above the
            minimum it goes, in which steps (elements), and the minimum.
        memstats: what an earlier run measured.
        verbose: tell the chunk size and its waste.
        dtype: see ``ZeroDDP``.
        compute_capacity, host_capacity: bytes that model data may take of the compute device and of the host.
        prefetch: chunks to fetch ahead.
        host_buffers: gradient buffers on the host; by default as many as there are chunks.
        disk_dir, disk_capacity: a directory on a disk for what does not fit into ``host_capacity``, and the
            bytes that it may take.

    The others are those of ``ZeroDDP``.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None = None,
        placement_policy: str = "cpu",
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        scatter_after_inference: bool = True,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        memstats: MemStats | None = None,
        verbose: bool = False,
        *,
        dtype: torch.dtype = torch.float16,
        mesh: Mesh | None = None,
        seed: int = 1024,
        compute_capacity: int | None = None,
        host_capacity: int | None = None,
        prefetch: int = 2,
        host_buffers: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_capacity: int | None = None,
    ) -> None:
        PlacementPolicyFactory.create(placement_policy)
        check_model(module, dtype)
        mesh = mesh if mesh is not None else model_mesh(module)
        where = torch.device(device) if device is not None else None
        chunks: ChunkManager = init_chunk_manager(
            module,
            None,
            hidden_dim,
            verbose,
            search_range_mb=search_range_mb,
            min_chunk_size_mb=roomier_chunks(module, min_chunk_size_mb, dtype),
            strict_ddp_flag=strict_ddp_mode,
            dtype=dtype,
            device=where,
            ranks=data_ranks(mesh, where),
            compute_capacity=compute_capacity,
            host_capacity=host_capacity,
            disk_dir=disk_dir,
            disk_capacity=disk_capacity,
        )
        manager = GeminiManager(
            placement_policy, chunks, memstats, prefetch=prefetch, host_buffers=host_buffers
        )
        super().__init__(
            module,
            manager,
            pin_memory,
            force_outputs_fp32,
            strict_ddp_mode,
            scatter_after_inference,
            dtype=dtype,
            mesh=mesh,
            seed=seed,
        )


def state_shards(
    model: ZeroDDP, prefix: str, max_shard_size: float, everywhere: bool, dtype: torch.dtype | None
) -> Iterator[OrderedDict[str, Any]]:
    """Gather weights and buffers in shards of at most ``max_shard_size`` MB.

    A tensor under several names is in one shard.  Unless shards are wanted ``everywhere``, all ranks but the
    first get as many, all empty.  No rank holds more than a shard.
    """
    if not max_shard_size > 0:
        raise ValueError(f"state_dict_shard needs max_shard_size in MB, above 0; got {max_shard_size!r}")
    return _shards(model, prefix, max_shard_size, everywhere, dtype)


def _shards(
    model: ZeroDDP, prefix: str, max_shard_size: float, everywhere: bool, dtype: torch.dtype | None
) -> Iterator[OrderedDict[str, Any]]:
    names: dict[int, list[str]] = {}
    state = model.unwrap().state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(prefix + name)
    slots = [(chunk, slot) for chunk in model.chunk_manager.chunks for slot in chunk.slots]
    params = {id(slot.param) for _, slot in slots}
    buffers = {id(t): t.detach() for t in state.values() if isinstance(t, Tensor) and id(t) not in params}
    found = [names.get(id(slot.param), []) for _, slot in slots] + [names[key] for key in buffers]
    sizes = [slot.numel * (dtype or chunk.dtype).itemsize / MB for chunk, slot in slots]
    sizes += map(calculate_tensor_size, buffers.values())
    keeps = everywhere or model.chunk_manager.ranks.rank == 0
    gathered = (value for _, value in model.whole_values(dtype, everywhere))
    values = chain(gathered, (t.to("cpu", copy=True) for t in buffers.values()))
    for numbers, _ in plan_shards((([i], size) for i, size in enumerate(sizes)), max_shard_size):
        taken = [(found[i], next(values)) for i in numbers]
        yield OrderedDict((name, value) for own, value in taken if keeps for name in own)


def get_static_torch_model(
    zero_ddp_model: ZeroDDP,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module:
    """Make an ordinary copy of the model, with whole and plain parameters, on the first rank, or on all.

    Every rank must call it.  With ``only_rank_0`` the weights of the other data-parallel ranks are NaN.
    Parameters that tensor-parallel ranks cut between them are brought together.
    """
    state = zero_ddp_model.state_dict(only_rank_0=only_rank_0)
    slots = [slot for chunk in zero_ddp_model.chunk_manager.chunks for slot in chunk.slots]
    # not to_empty(): it would untie weights, and lose attributes and the buffers that are in no state dict
    blank = {id(slot.param): _blank(slot, device, dtype) for slot in slots}
    model = without_hooks(copy.deepcopy(zero_ddp_model.unwrap(), blank)).to(device, dtype)
    if state:
        named = zero_ddp_model.unwrap().state_dict(keep_vars=True)
        model.load_state_dict({name: _whole(named[name], value) for name, value in state.items()})
    return model


def _blank(slot: ParamSlot, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter of NaN for one in a chunk; for a ColoParameter, a plain and whole one."""
    param: Any = slot.param
    is_colo = isinstance(param, ColoTensor)
    shape, kind = (param.full_shape, nn.Parameter) if is_colo else (slot.shape, slot.kind)
    values = torch.full(shape, float("nan"), dtype=dtype, device=device)
    made: nn.Parameter = kind(values, param.requires_grad)
    noted = user_attributes(param) if is_colo else param.__dict__
    made.__dict__.update({name: value for name, value in noted.items() if name not in (REASON, IN_CHUNKS)})
    return made


def _whole(param: Any, piece: Tensor) -> Tensor:
    """Bring the pieces of ``param``, a ColoParameter that is cut, together; leave anything else as it is."""
    if cut_dim(param) is None:
        return piece
    on_device = piece.to(param.device)  # where the ranks can reach it
    return unshard(on_device, param.placement, param.process_group.mesh).to(piece.device)
