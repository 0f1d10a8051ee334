"""``Booster``: from the objects of a plain training script to the same objects under a plan.

It only decides the order: device, then mixed precision, then plugin.  What a plan does is in its plugin, what
a precision does in its ``MixedPrecision``, and what both hand back are the wrappers of
``colossalai.interface``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossalai.booster.accelerator import Accelerator
from colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory, precision_name
from colossalai.booster.pipelines import Pipelines
from colossalai.booster.plans import choose_plan
from colossalai.booster.plugin import GeminiPlugin, Plugin
from colossalai.booster.plugin.dp import DPPluginBase
from colossalai.booster.runs import Runs
from colossalai.booster.save_options import by_name
from colossalai.booster.support import Plan, Wanted, check_supported, shares_models, warn_of_replicas
from colossalai.checkpoint_io import CheckpointIO, GatheredCheckpointIO, GeneralCheckpointIO, Save
from colossalai.interface import (
    LossWatch,
    LRSchedulerWrapper,
    ModelWrapper,
    OptimizerWrapper,
    below_compile,
    check_loss,
    user_module,
)
from colossalai.interface.first_step import watch_first_step, watch_steps
from colossalai.interface.foreign_parameters import strangers
from colossalai.mesh import placement
from colossalai.mesh.parameter import model_mesh
from colossalai.mesh.weights.deferred import fill_beside_parameters, fill_deferred, materialize, states_of
from colossalai.mesh.weights.meta_models import defer_meta, draws_itself, is_cut_on_meta, is_on_meta
from colossalai.nn.policies.stages.stage import ModelStage
from colossalai.pipeline.chunks import with_chunks
from colossalai.utils.boosted import is_boosted, mark_boosted
from colossalai.utils.dataloader import check_not_empty, data_parallel_place, warn_if_undivided
from colossalai.utils.parallel import mesh_of_model, raised_together


class Boosted(NamedTuple):
    """The objects that ``boost`` returns; they unpack in the documented order."""

    model: nn.Module
    optimizer: Any  # an OptimizerWrapper, or None where none was given
    criterion: Callable[..., Any] | None
    dataloader: DataLoader | None
    lr_scheduler: LRScheduler | None


class Booster:
    """Boost a training script.

    Args:
        device: ``'cuda'``, ``'cpu'`` or a ``torch.device``; by default CUDA where it is present, else the
            CPU.
        mixed_precision: a name such as ``'bf16'``, or a ``MixedPrecision``; ``'fp32'`` computes in the
            precision of the model, which is the default except under ZeRO and Gemini.
        plugin: the plan; without one, training is serial, on one device.  A plugin, the name of a plan
            (``'ddp'``, ``'fsdp'``, ``'zero1'``, ``'zero2'``, ``'gemini'`` ...), a dict such as ``{'plugin':
            'zero2', 'max_norm': 1.0}``, or a ``.yaml``, ``.json`` or ``.py`` file with such a dict, which may
            also set ``mixed_precision`` and ``device``.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        plugin, of_file = choose_plan(plugin)
        device = _once("device", device, of_file)
        mixed_precision = _once("mixed_precision", mixed_precision, of_file)
        self.plugin = plugin
        self.accelerator = self._choose_device(device)
        """Its ``device`` is where the model computes, under every plan: inputs go there."""
        self.mixed_precision = self._choose_precision(mixed_precision)
        self.checkpoint_io: CheckpointIO = (
            plugin.get_checkpoint_io()
            if plugin is not None and plugin.control_checkpoint_io()
            else GatheredCheckpointIO()
            if shares_models()
            else GeneralCheckpointIO()
        )
        self.averaged_over: frozenset[int] = frozenset()
        """The ranks over which gradient handlers average, where there is no plugin; set by ``initialize``."""
        self._watch = LossWatch()
        self._pipelines = Pipelines()
        self._runs = Runs()

    def _choose_device(self, device: str | torch.device | None) -> Accelerator:
        plugin = self.plugin
        if plugin is not None and plugin.control_device():
            if device is not None:
                warnings.warn(
                    f"{type(plugin).__name__} chooses the device; device={device!r} has no effect",
                    stacklevel=3,
                )
            return Accelerator.of_plan(plugin.device)
        accelerator = Accelerator(device)
        if plugin is not None and accelerator.device.type not in plugin.supported_devices():
            raise ValueError(
                f"{type(plugin).__name__} does not run on {accelerator.device.type!r}, only on"
                f" {', '.join(plugin.supported_devices())}"
            )
        accelerator.bind()
        return accelerator

    def _choose_precision(self, precision: MixedPrecision | str | None) -> MixedPrecision | None:
        plugin = self.plugin
        if precision is None:
            return None
        if plugin is not None and plugin.control_precision():
            plugin.take_precision(precision)
            return None
        if precision == "fp32":
            return None
        chosen = precision if isinstance(precision, MixedPrecision) else mixed_precision_factory(precision)
        name = precision_name(chosen)  # a precision of the user's own has no name, and is the user's affair
        if plugin is not None and name is not None and name not in plugin.supported_precisions():
            raise ValueError(
                f"{type(plugin).__name__} does not support mixed_precision={name!r}, only"
                f" {', '.join(plugin.supported_precisions())}"
            )
        return chosen

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Put the plan into the training objects; go on with what is returned.

        All but the model may be left out.
        """
        _check_boostable(model, optimizer)
        _check_companions(optimizer, criterion, dataloader, lr_scheduler)
        check_not_empty("the dataloader of boost", dataloader)
        raw_model, raw_optimizer = user_module(model), optimizer
        model = with_chunks(model)
        plan = None if self.plugin is None else Plan.of(self.plugin)
        wanted = Wanted(
            model=model,
            optimizer=optimizer,
            plan=plan,
            criterion=criterion,
            averaged_over=self.averaged_over,
        )
        check_supported(wanted)
        warn_of_replicas(wanted)
        warn_if_undivided("the dataloader of boost", dataloader, self._readers)
        mesh = mesh_of_model(raw_model)
        self._gather_if_shared(raw_model)
        if any(map(is_on_meta, user_module(model).parameters())) and self._draws_meta(model):
            defer_meta(user_module(model))
        if self.plugin is None or not self.plugin.control_device():
            model = self.accelerator.configure_model(model)
        self._give_memory(model, optimizer, criterion)
        if self.mixed_precision is not None:
            model, optimizer, criterion = self.mixed_precision.configure(model, optimizer, criterion)
        if self.plugin is not None:
            with raised_together("could not be boosted", isinstance(self.plugin, DPPluginBase)):
                model, optimizer, criterion, dataloader, lr_scheduler = self.plugin.configure(
                    model, optimizer, criterion, dataloader, lr_scheduler
                )
        model = model if isinstance(model, ModelWrapper) else ModelWrapper(model)
        if optimizer is not None:
            optimizer = optimizer if isinstance(optimizer, OptimizerWrapper) else OptimizerWrapper(optimizer)
            if optimizer.mesh is None:  # the parameters may be cut over that of the job, whatever the plugin
                optimizer.mesh = mesh
            if lr_scheduler is not None and optimizer.skips_steps:
                lr_scheduler = LRSchedulerWrapper(lr_scheduler, optimizer)
            watch_steps(user_module(model), optimizer, mesh)
        watch_first_step(model, mesh)
        model.hand_over()
        mark_boosted(raw_model, raw_optimizer)
        self._runs.add(model, optimizer, lr_scheduler, dataloader)
        return Boosted(model, optimizer, criterion, dataloader, lr_scheduler)

    @property
    def _readers(self) -> int:
        """How many ranks train on samples of their own."""
        if isinstance(self.plugin, DPPluginBase):
            return self.plugin.world_size
        return data_parallel_place()[1] if self.averaged_over else 1

    def _gather_if_shared(self, model: nn.Module) -> None:
        """Let files be those of the serial model if the ranks share ``model``, whatever was launched."""
        if model_mesh(user_module(model)) is not None and type(self.checkpoint_io) is GeneralCheckpointIO:
            self.checkpoint_io = GatheredCheckpointIO()

    def _draws_meta(self, model: nn.Module) -> bool:
        """Whether a model on the meta device is drawn here: not in a dry run, and not what Gemini draws from
        its own seed.
        """
        if dist.is_initialized() and dist.get_backend() == "fake":
            return False
        if not draws_itself(user_module(model)) and isinstance(self.plugin, GeminiPlugin):
            return False
        if is_cut_on_meta(user_module(model)):
            return True
        if any(placement(p).sharded for p in model.parameters()) or any(
            isinstance(part, ModelStage) for part in model.modules()
        ):
            raise ValueError(
                f"this {type(user_module(model)).__name__} was cut on the meta device, and nothing says which"
                " values its pieces have; build it in colossalai.lazy.LazyInitContext(), or fill it by"
                " colossalai.checkpoint_io.load_pretrained before boost"
            )
        return True

    def _give_memory(self, model: nn.Module, optimizer: Optimizer | None, criterion: Any) -> None:
        """Fill what was built in a ``LazyInitContext``, but for parameters that the plugin fills itself."""
        if self.plugin is not None and self.plugin.fills_parameters:
            fill_beside_parameters(model)
        else:
            materialize(model)
        if optimizer is not None:
            fill_deferred([*strangers(optimizer, model).held, *states_of(optimizer)])
        if isinstance(criterion, nn.Module):
            materialize(criterion)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """The backward pass of ``loss``, scaled and synchronized as the plan needs it.

        The first loss that is nan or infinite is logged, and goes its way.
        """
        if not isinstance(optimizer, OptimizerWrapper):
            raise TypeError(
                "booster.backward needs the optimizer that booster.boost returned, got"
                f" {type(optimizer).__name__}"
            )
        check_loss(loss, "booster.backward")
        self._watch.see(loss, optimizer.skips_steps)
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Take the next batch through the pipeline of the launched job, and back if there is an
        ``optimizer``.

        ``model`` is this rank's stage (or ``nn.ModuleList`` of chunks), as ``boost`` returned it.  Every rank
        passes the same batch.  Returns ``{"loss": ..., "outputs": ...}``, with None where not asked for and
        on the ranks without the last layers.  Gradients are averaged over the data-parallel ranks; go on with
        ``optimizer.step()``.
        """
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            raise TypeError(
                "booster.execute_pipeline needs the optimizer that booster.boost returned, got"
                f" {type(optimizer).__name__}"
            )
        return self._pipelines.execute(
            data_iter,
            model,
            criterion,
            optimizer,
            plugin=self.plugin,
            return_loss=return_loss,
            return_outputs=return_outputs,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this context, gradients accumulate on each rank and are not synchronized.

        Without a plugin there is nothing to synchronize, and nothing happens.
        """
        if self.plugin is None:
            return nullcontext()
        if not self.plugin.support_no_sync():
            raise RuntimeError(f"{type(self.plugin).__name__} does not support no_sync")
        return self.plugin.no_sync(model)

    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int | None = None,
        size_per_shard: float = 1024,
        background: bool = False,
    ) -> Save:
        """Save all that a run needs to go on: what ``boost`` returned, random states, loss scale, position in
        the data.

        Every rank calls this.  The checkpoint is complete or not there at all, whenever a machine stops; it
        can be loaded under any other plan, on any number of ranks.  If one rank fails, all raise.

        Args:
            path: the folder of this checkpoint; an older one in it is replaced.
            extra: further values (numbers, strings, small tensors and lists and dicts of them), which
                ``load`` returns.
            keep: of the checkpoints in the folder around ``path``, only the last so many stay.
            size_per_shard: the most MB of a file.
            background: return as soon as everything is copied to the host, and write while training goes on.
                An error is raised by ``wait`` of what is returned, or by the next ``save`` or ``load``; the
                next save waits for this one.
        """
        self._watch.report()
        state = self._runs.state(path, self._plan(), extra)
        return self._runs.writer.save(
            state.collect,
            state.merge,
            path,
            keep=keep,
            size_per_shard=size_per_shard,
            background=background,
        )

    def load(self, path: str | Path, *, strict: bool = True, verify: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint of ``save``, written under any plan; returns its ``extra``.

        Every rank calls this.

        Args:
            path: a checkpoint, or a folder of checkpoints, of which the latest is loaded.
            strict: refuse weights that only one of model and checkpoint has, and an optimizer that the
                checkpoint does not know. Without it, these stay as they are, and parameters that are new to
                the optimizer start without states.
            verify: compare the checksums of everything that is stored before anything is changed.
        """
        state = self._runs.state(path)
        self._runs.writer.wait()
        return state.load(path, strict=strict, verify=verify)

    def _plan(self) -> dict[str, Any]:
        """How this job runs, for people who look at its checkpoints."""
        return {
            "plugin": None if self.plugin is None else type(self.plugin).__name__,
            "precision": None if self.mixed_precision is None else type(self.mixed_precision).__name__,
        }

    @overload
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool,
        gather_dtensor: bool = ...,
        variant: str | None = ...,
        size_per_shard: float = ...,
        use_safetensors: bool = ...,
    ) -> None: ...

    @overload
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        prefix: str | None = ...,
        shard: bool = ...,
        size_per_shard: float = ...,
        *,
        gather_dtensor: bool = ...,
        use_safetensors: bool = ...,
    ) -> None: ...

    def save_model(self, model: nn.Module, checkpoint: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the weights of ``model``: one file, or with ``shard`` a folder that Hugging Face can open.

        The documents call this in two orders, and both work: ``(model, checkpoint, shard, gather_dtensor,
        variant, size_per_shard, use_safetensors)`` and ``(model, checkpoint, prefix, shard,
        size_per_shard)``.  ``prefix`` and ``variant`` are two names for one thing, a word in the names of the
        files.  Sizes are in MB.
        """
        options = by_name(args, kwargs)
        _check_type("save_model", "a model", model, nn.Module)
        self._watch.report()
        self._gather_if_shared(model)
        self.checkpoint_io.save_model(model, checkpoint, **options)

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> None:
        """Load weights from a file, an index or a folder into a model, boosted or not."""
        _check_type("load_model", "a model", model, nn.Module)
        self._gather_if_shared(model)
        self.checkpoint_io.load_model(model, checkpoint, strict)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        size_per_shard: float = 1024,
        *,
        prefix: str | None = None,
    ) -> None:
        """Save an optimizer: one file, or with ``shard`` a folder of files of at most ``size_per_shard``
        MB.
        """
        _check_type("save_optimizer", "an optimizer", optimizer, Optimizer)
        self.checkpoint_io.save_optimizer(
            optimizer, checkpoint, shard, prefix=prefix, size_per_shard=size_per_shard
        )

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """Load the states of an optimizer, boosted or not."""
        _check_type("load_optimizer", "an optimizer", optimizer, Optimizer)
        self.checkpoint_io.load_optimizer(optimizer, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Save the state of a learning-rate scheduler to the file ``checkpoint``."""
        _check_scheduler("save_lr_scheduler", lr_scheduler)
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load what ``save_lr_scheduler`` wrote."""
        _check_scheduler("load_lr_scheduler", lr_scheduler)
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)


def _once(name: str, given: Any, of_file: Mapping[str, Any]) -> Any:
    """The value of an argument, or of the plan's file, which must not both have one."""
    if given is not None and of_file.get(name, given) != given:
        raise ValueError(f"Booster got {name}={given!r}, and its plan has {of_file[name]!r}; keep one")
    return of_file.get(name, given)


def _check_boostable(model: nn.Module, optimizer: Optimizer | None) -> None:
    _check_type("boost", "a model", model, nn.Module)
    if optimizer is not None:
        _check_type("boost", "an optimizer", optimizer, Optimizer)
    inner = below_compile(model)
    for name, item, wrapper in (("model", inner, ModelWrapper), ("optimizer", optimizer, OptimizerWrapper)):
        if item is not None and (isinstance(item, wrapper) or is_boosted(item)):
            raise RuntimeError(
                f"this {name} ({type(item).__name__}) was boosted before; go on with what that call returned,"
                f" or build a new {name}"
            )


def _check_companions(
    optimizer: Optimizer | None,
    criterion: Callable[..., Any] | None,
    dataloader: DataLoader | None,
    lr_scheduler: LRScheduler | None,
) -> None:
    if criterion is not None and (not callable(criterion) or isinstance(criterion, type)):
        raise TypeError(
            f"boost needs a criterion that can be called with outputs and targets, got {criterion!r}"
        )
    if dataloader is not None and not hasattr(dataloader, "__iter__"):
        raise TypeError(f"boost needs a dataloader that can be iterated over, got {dataloader!r}")
    if lr_scheduler is None:
        return
    _check_scheduler("boost", lr_scheduler)
    driven = getattr(lr_scheduler, "optimizer", optimizer)
    if optimizer is not None and driven is not optimizer:
        raise ValueError(
            f"the lr_scheduler ({type(lr_scheduler).__name__}) was built on another optimizer"
            f" ({type(driven).__name__}) than the one that is boosted, whose learning rate it would never"
            " change"
        )


def _check_scheduler(who: str, value: object) -> None:
    wanted = ("step", "state_dict", "load_state_dict")
    if isinstance(value, nn.Module | Optimizer | type) or not all(hasattr(value, name) for name in wanted):
        raise TypeError(f"{who} needs a learning-rate scheduler, with {', '.join(wanted)}; got {value!r}")


def _check_type(who: str, name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        made = " (a class: pass an instance)" if isinstance(value, type) else ""
        raise TypeError(f"{who} needs {name} of type {kind.__module__}.{kind.__name__}, got {value!r}{made}")
