"""booster.save and booster.load on several ranks: one failure is everybody's, tied stages, random states,
positions in the data.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.checkpoint_io.runs import writing
from colossalai.checkpoint_io.runs.manifest import read_manifest
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.booster.plans import launch


def _failures(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    torch.manual_seed(0)
    model = booster.boost(nn.Linear(4, 4)).model
    booster.save(folder / "c", {"step": 1})
    before = sorted(p.name for p in (folder / "c").iterdir())
    dist.barrier()

    def broken(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for background in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(writing, "write_tensors", broken)
            own = r"00001-00000\.safetensors cannot be written: No space left"
            with pytest.raises(
                (OSError, RuntimeError), match=own if rank else f"rank 1 could not save: OSError.*{own}"
            ):
                booster.save(folder / "c", {"step": 2}, background=background).wait()
        dist.barrier()
        assert sorted(p.name for p in (folder / "c").iterdir()) == before
    # a rank that cannot even say what it holds
    hook = model.unwrap()._register_state_dict_hook(lambda *_: {"x": torch.ones(1)}) if rank == 1 else None
    with pytest.raises((ValueError, RuntimeError), match=r"the state_dict of \S+ computes x"):
        booster.save(folder / "c")
    if hook is not None:
        hook.remove()
    assert booster.load(folder) == {"step": 1}
    # damage that only one rank looks at is known to all
    file = folder / "c" / read_manifest(folder / "c").files[-1]
    intact = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(RuntimeError, match=rf"{file.name} is damaged: the checksum of"):
        booster.load(folder)


def test_if_one_rank_fails_all_do_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    spawn(_failures, 2, folder=tmp_path)


def _drawn() -> list[float]:
    return torch.rand(2).tolist()


def _ddp(rank: int, world_size: int, port: int, folder: Path, batch: int, save: bool) -> list[float]:
    launch(rank, world_size, port)
    plugin = TorchDDPPlugin()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = plugin.prepare_dataloader(TensorDataset(torch.arange(12.0)), batch_size=batch, shuffle=True)
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    seen: list[float] = []
    if save:
        for i, (x,) in enumerate(loader):
            if i == 1:
                booster.save(folder / "c")
            if i >= 1:
                seen += x.tolist()
        return [*seen[batch:], *_drawn()]
    booster.load(folder)
    for (x,) in loader:
        seen += x.tolist()
    return [*seen, *_drawn()]


def test_the_same_world_draws_on_and_another_one_reads_on(tmp_path: Path) -> None:
    first = spawn(_ddp, 2, folder=tmp_path, batch=2, save=True)
    same = spawn(_ddp, 2, folder=tmp_path, batch=2, save=False)
    assert same == first  # the samples that were left, and the next random numbers
    other = spawn(_ddp, 1, folder=tmp_path, batch=4, save=False)
    again = spawn(_ddp, 1, folder=tmp_path, batch=4, save=False)
    assert sorted(other[0][:-2]) == sorted(x for seen in first for x in seen[:-2])
    assert other == again  # the random numbers are others, but follow from the checkpoint
    assert other[0][-2:] != first[0][-2:]


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class Last(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 6, bias=False)
        if weight is not None:
            self.head.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Loss(nn.Module):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, labels)


def _tied(rank: int, world_size: int, port: int, folder: Path, load: bool) -> None:
    config = {"parallel": {"pipeline": world_size}, "NUM_MICRO_BATCHES": 2}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(1 if load else 0)
    first = First()
    if world_size == 1:
        model: nn.Module = nn.ModuleDict({"first": first, "last": Last(first.embedding.weight)})
    else:
        stage = gpc.get_local_rank(ParallelMode.PIPELINE)
        part = first if stage == 0 else Last()
        model = nn.ModuleDict({("last" if stage else "first"): part})
        shared = PipelineSharedModuleWrapper([0, 1])
        shared.register_parameter(part.embedding.weight if stage == 0 else part.head.weight)  # type: ignore[union-attr]
    booster = Booster("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    boosted = booster.boost(model, optimizer)
    weight = next(p for p in model.parameters() if p.ndim == 2)
    if load:
        booster.load(folder)
        assert torch.equal(weight.detach(), torch.full_like(weight, 3.0))
        assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 2.0))
        return
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    boosted.optimizer.step()
    with torch.no_grad():
        weight.fill_(3.0)
        optimizer.state[weight]["exp_avg"].fill_(2.0)
    booster.save(folder / f"by{world_size}")
    manifest = read_manifest(folder / f"by{world_size}")
    assert manifest.ties["model/last.head.weight"] == "model/first.embedding.weight"
    assert sum(name.endswith("exp_avg") for name in manifest.tensors) == 3


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_a_tied_weight_is_stored_once_and_found_by_all_stages(
    tmp_path: Path, writers: int, readers: int
) -> None:
    spawn(_tied, writers, folder=tmp_path, load=False)
    spawn(_tied, readers, folder=tmp_path, load=True)


def _collide(rank: int, world_size: int, port: int, folder: Path) -> None:
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    booster = Booster("cpu")
    booster.boost(nn.Sequential(nn.Linear(2, 2)))  # both stages call their layer "0"
    with pytest.raises(
        ValueError, match=r"stages 0 and 1 \(ranks 0 and 1\) both have a parameter model/0\.weight"
    ):
        booster.save(folder / "c")
    assert not (folder / "c").exists()


def test_stages_with_names_of_their_own_are_refused(tmp_path: Path) -> None:
    spawn(_collide, 2, folder=tmp_path)


def _statistics(rank: int, world_size: int, port: int, folder: Path) -> dict[str, Tensor]:
    launch(rank, world_size, port)
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    torch.manual_seed(0)
    model, optimizer, *_ = booster.boost(model := nn.BatchNorm1d(3), torch.optim.SGD(model.parameters(), 0.1))
    booster.backward(model(torch.randn(4, 3) * (rank + 1) + rank).square().mean(), optimizer)
    booster.save(folder / "c")
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_statistics_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """Ranks share the writing of what they hold alike; a mixture of their statistics would belong to no
    model.
    """
    first, second = spawn(_statistics, 2, folder=tmp_path)
    assert not torch.equal(first["running_mean"], second["running_mean"])
    booster = Booster("cpu")
    model = booster.boost(model := nn.BatchNorm1d(3), torch.optim.SGD(model.parameters(), 0.1)).model
    booster.load(tmp_path / "c")
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, first[name]), name


def _beside(rank: int, world_size: int, port: int, folder: Path) -> None:
    """A save by the main thread, while one in the background is not done on every rank."""
    launch(rank, world_size, port)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    torch.manual_seed(0)
    raw = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(raw, torch.optim.Adam(raw.parameters()))
    may_write, write_files = threading.Event(), writing._write_files

    def late(draft: Any) -> Any:
        assert rank == 0 or may_write.wait(30)
        return write_files(draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_write_files", late)
        save = booster.save(folder / "c", background=True)
        save_checkpoint(folder / "file", 3, model, optimizer)
        may_write.set()
        save.wait()
    other = nn.Linear(4, 4)
    assert load_checkpoint(folder / "file", other) == 3
    torch.testing.assert_close(other.weight, model.unwrap().weight.full_tensor())  # type: ignore[operator,union-attr]


def test_a_save_beside_one_in_the_background(tmp_path: Path) -> None:
    spawn(_beside, 2, folder=tmp_path)
