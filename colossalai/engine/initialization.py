"""``initialize``: from the objects of a plain training script and the launched config to an ``Engine``.

It only chooses: which plugin, which precision, which handlers.  ``Booster`` does the work.
"""

from __future__ import annotations

import pprint
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.booster.support import Plan, Wanted, check_supported
from colossalai.context import ParallelMode
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.engine.engine import Engine
from colossalai.engine.features import Features
from colossalai.engine.gradient_accumulation import accumulate_gradient
from colossalai.engine.gradient_handler import SHARED_GROUP, BaseGradientHandler, build_gradient_handler
from colossalai.engine.ophooks import BaseOpHook
from colossalai.engine.schedule import BaseSchedule, InterleavedPipelineSchedule, PipelineSchedule
from colossalai.engine.zero_section import zero_plugin
from colossalai.logging import get_dist_logger
from colossalai.mesh.parameter import model_mesh
from colossalai.mesh.weights.deferred import materialize
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.utils import get_current_device, is_using_moe, is_using_pp, is_using_sequence
from colossalai.utils.dataloader import check_not_empty
from colossalai.utils.parallel import averaging_group, averaging_size, row_mode, share_weights

Initialized = tuple[Engine, Any, Any, Any]


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: LRScheduler | None = None,
    ophooks: Sequence[BaseOpHook] | None = None,
    verbose: bool = True,
) -> Initialized:
    """Put the features of the config into the training objects: ``(engine, train, test dataloader,
    lr_scheduler)``.

    Needs ``colossalai.launch`` before it.  ``model`` may be a function that builds the model, and
    ``optimizer`` a class (or function) that takes its parameters.  Go on with what is returned: under
    gradient accumulation the training data loader and the scheduler are wrapped.
    """
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        raise RuntimeError(
            "colossalai.initialize needs a launched job; call colossalai.launch_from_torch first"
        )
    features = Features.from_config(gpc.config)
    _check_arguments(features, train_dataloader, test_dataloader, lr_scheduler)
    _set_cudnn(features)
    if verbose:
        _log(features)
    schedule = schedule_of_config()
    model, optimizer = _build(model, optimizer)
    booster = _make_booster(features, model, optimizer, criterion)
    boosted = booster.boost(model, optimizer, criterion, train_dataloader, lr_scheduler)  # type: ignore[arg-type]
    handlers = handlers_of(features, boosted.model, boosted.optimizer)
    parts: tuple[Any, ...] = (boosted.optimizer, boosted.dataloader, handlers, boosted.lr_scheduler)
    if features.accumulate > 1:
        parts = accumulate_gradient(
            boosted.model,
            boosted.optimizer,
            boosted.dataloader,
            features.accumulate,
            handlers,
            boosted.lr_scheduler,
        )
    ready_optimizer, train_dataloader, ready_handlers, lr_scheduler = parts
    engine = Engine(
        boosted.model,
        ready_optimizer,
        boosted.criterion,
        ready_handlers,
        features.clip_grad_norm,
        ophooks,
        verbose,
        schedule,
    )
    engine.booster = booster
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _make_booster(features: Features, model: nn.Module, optimizer: Optimizer, criterion: Any) -> Booster:
    """Make the booster of the config, refuse plans that it cannot train, and let the replicas start alike."""
    plugin = _plugin(features, model, optimizer)
    plan = None if plugin is None else Plan.of(plugin)
    averages = plan is None and model_mesh(model) is None
    wanted = Wanted(
        model=model,
        optimizer=optimizer,
        plan=plan,
        pipeline=_pipeline_options(),
        criterion=criterion,
        averaged_over=frozenset(gpc.get_ranks_in_group(row_mode())) if averages else frozenset(),
    )
    check_supported(wanted, ConfigException)
    booster = Booster(mixed_precision=features.precision, plugin=plugin)
    booster.averaged_over = wanted.averaged_over
    if booster.plugin is None:
        _share_weights(model)  # before boost, which may copy them into master weights
    return booster


def _check_arguments(
    features: Features, train_dataloader: Any, test_dataloader: Any, lr_scheduler: Any
) -> None:
    for name, dataloader in (("train_dataloader", train_dataloader), ("test_dataloader", test_dataloader)):
        if not (dataloader is None or isinstance(dataloader, Iterable) or hasattr(dataloader, "__getitem__")):
            raise TypeError(
                f"colossalai.initialize needs {name} as a data loader or another iterable of batches, got"
                f" {dataloader!r}"
            )
        check_not_empty(name, dataloader)
    if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(
            "colossalai.initialize needs lr_scheduler as a learning-rate scheduler, with a step(), got"
            f" {lr_scheduler!r}"
        )
    if features.accumulate > 1 and train_dataloader is None:
        get_dist_logger().warning_once(
            "config has gradient_accumulation, but initialize got no train_dataloader; so the end of a pass"
            " over the data is not seen, and its last group goes on in the next pass. Pass train_dataloader"
            " and loop over the one that is returned",
            ranks=[0],
        )


def _build(model: Any, optimizer: Any) -> tuple[nn.Module, Optimizer]:
    if not isinstance(model, nn.Module) and callable(model):
        model = model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"colossalai.initialize needs a model, or a function that builds one, got {model!r}")
    model = with_chunks(model)
    if not isinstance(optimizer, Optimizer) and callable(optimizer):
        parameters: list[Any] = list(model.parameters())
        if not parameters and is_using_pp():
            parameters = [
                {"params": []}
            ]  # a stage may have none; optimizers refuse an empty list, not an empty group
        optimizer = optimizer(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "colossalai.initialize needs an optimizer, or a class or function that takes parameters, got"
            f" {optimizer!r}"
        )
    return model, optimizer


def _pipeline_options() -> PipelineOptions | None:
    return PipelineOptions.from_config(gpc.config, gpc.plan) if is_using_pp() else None


def schedule_of_config() -> BaseSchedule | None:
    """The pipeline schedule that the config asks for; None without a pipeline."""
    options = _pipeline_options()
    if options is None:
        return None
    shape, name = options.told_shape, options.schedule
    if options.chunks == 1:
        return PipelineSchedule(options.microbatches, tensor_shape=shape, schedule=name)
    return InterleavedPipelineSchedule(
        options.microbatches, options.chunks, tensor_shape=shape, schedule=name
    )


def _plugin(features: Features, model: nn.Module, optimizer: Optimizer) -> Plugin | None:
    """DDP averages gradients, unless ZeRO or handlers do so or there is nothing to average."""
    if features.zero is not None:
        return zero_plugin(features.zero, averaging_group(), model, optimizer)
    by_handlers = features.handlers or is_using_pp() or is_using_moe()
    if averaging_size() == 1 or by_handlers or model_mesh(model) is not None:
        if features.ddp_options:
            why = "gradient handlers take the place of DDP" if by_handlers else "there is one replica"
            get_dist_logger().warning(f"config section 'torch_ddp' has no effect: {why}", ranks=[0])
        return None
    try:
        return TorchDDPPlugin(process_group=averaging_group(), **features.ddp_options)
    except TypeError as error:
        raise ConfigException(f"config section 'torch_ddp': {error}") from error


def handlers_of(features: Features, model: nn.Module, optimizer: Optimizer) -> list[BaseGradientHandler]:
    """Build the gradient handlers of the config, and those that pipelines and experts need: sums over stages,
    then means.
    """
    configs = list(features.handlers)
    needed = is_using_pp() or is_using_moe()
    if needed and not configs and features.zero is None and averaging_size() > 1:
        # in a pipeline once after all micro-batches, where DDP would do so after each
        rows = "SequenceParallel" if is_using_sequence() else "DataParallel"
        configs.append({"type": f"{'Moe' if is_using_moe() else rows}GradientHandler"})
    shared = {"type": "PipelineSharedModuleGradientHandler"}
    if any(hasattr(p, SHARED_GROUP) for p in model.parameters()) and shared not in configs:
        configs.insert(0, shared)  # sums before means, as in Booster.execute_pipeline
    return [build_gradient_handler(config, model, optimizer) for config in configs]


def _share_weights(model: nn.Module) -> None:
    """Replicas start alike, with the values of the first one; DDP does this by itself."""
    if averaging_size() > 1:
        share_weights(materialize(model).to(get_current_device()))  # where the group can reach them


def _set_cudnn(features: Features) -> None:
    torch.backends.cudnn.benchmark = features.cudnn_benchmark
    torch.backends.cudnn.deterministic = features.cudnn_deterministic


def _log(features: Features) -> None:
    logger = get_dist_logger()
    config = pprint.pformat(dict(gpc.config))
    logger.info(f"\n========== Your Config ========\n{config}\n================================\n", ranks=[0])
    logger.info(
        f"cuDNN benchmark = {features.cudnn_benchmark}, deterministic = {features.cudnn_deterministic}",
        ranks=[0],
    )
