"""``AlphaBetaProfiler``: which devices are close to each other, measured pair by pair, and the grid that fits
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from colossalai.device.device_mesh import DeviceMesh
from colossalai.device.measure import Timing, measure_axis
from colossalai.mesh import GroupMesh, collectives
from colossalai.mesh.collectives import Kind

AlphaBeta = dict[tuple[int, int], tuple[float, float]]
_KINDS: dict[str, Kind] = {"a": "all_reduce", "g": "all_gather", "t": "all_to_all"}


class AlphaBetaProfiler:
    """Measures alpha (seconds of latency) and beta (seconds per byte) between devices.

    Args:
        physical_devices: the global ranks; every one of them makes the profiler and calls its methods.
        alpha_beta_dict: for each pair of ranks (alpha, beta), where they are known; then nothing is measured
            and no job is needed.
        ctype: the collective that is timed: "a" all-reduce, "g" all-gather, "t" all-to-all.
        warmup: calls before the timing.
        repeat: calls that are timed, for each number of bytes.
        latency_iters: calls with a few bytes that are timed.
        homogeneous_tolerance: links whose betas differ by at most this fraction count as equally fast.
    """

    def __init__(
        self,
        physical_devices: Sequence[int],
        alpha_beta_dict: Mapping[tuple[int, int], tuple[float, float]] | None = None,
        ctype: str = "a",
        warmup: int = 5,
        repeat: int = 25,
        latency_iters: int = 5,
        homogeneous_tolerance: float = 0.1,
    ) -> None:
        self.physical_devices = sorted(physical_devices)
        if not self.physical_devices or len(set(self.physical_devices)) != len(self.physical_devices):
            raise ValueError(f"physical_devices must name each rank once, got {list(physical_devices)}")
        if ctype not in _KINDS:
            known = ", ".join(f"{key!r} ({kind})" for key, kind in _KINDS.items())
            raise ValueError(f"ctype={ctype!r} is unknown; choose one of {known}")
        if homogeneous_tolerance < 0:
            raise ValueError(f"homogeneous_tolerance={homogeneous_tolerance} must be at least 0")
        self.ctype = ctype
        self.homogeneous_tolerance = homogeneous_tolerance
        self._timing = Timing(warmup, repeat, latency_iters)
        self.alpha_beta_dict = self.profile_ab() if alpha_beta_dict is None else self._given(alpha_beta_dict)

    def profile_ab(self) -> AlphaBeta:
        """Measure every pair, one after the other; all ranks get the same table."""
        everyone = DeviceMesh(torch.tensor(self.physical_devices)).mesh
        device = everyone.device_type
        found: AlphaBeta = {}
        for together in _rounds(self.physical_devices):
            own = next(pair for pair in together if everyone.rank in pair)
            mesh = GroupMesh(own, {"pair": len(own)}, device)
            mesh.group("pair")  # also where a rank is alone: see _rounds
            for pair in together:
                if len(pair) < 2:
                    continue
                told = torch.zeros(2, dtype=torch.float64, device=device)
                if pair == own:
                    told += torch.tensor(measure_axis(mesh, "pair", _KINDS[self.ctype], self._timing)) / 2
                # the two have agreed on one value; the sum also keeps the others from starting their pair
                alpha, beta = collectives.all_reduce(told, everyone, "0").tolist()
                one, other = pair
                found[one, other] = found[other, one] = (alpha, beta)
        return found

    def _given(self, table: Mapping[tuple[int, int], tuple[float, float]]) -> AlphaBeta:
        found: AlphaBeta = {}
        for one, other in itertools.combinations(self.physical_devices, 2):
            found[one, other] = found[other, one] = _link(table, one, other)
        return found

    def search_best_logical_mesh(self) -> list[list[int]]:
        """The grid whose rows are the groups of devices with the fastest links, and whose columns are the
        links between them.

        Where all links are alike, it is as square as it can be: it has every layout of one long row, and
        more.
        """
        devices = self.physical_devices
        islands = self._islands()
        if len(islands) > 1 and len({len(island) for island in islands}) == 1 and len(islands[0]) > 1:
            return islands
        rows = max(n for n in range(1, math.isqrt(len(devices)) + 1) if len(devices) % n == 0)
        columns = len(devices) // rows
        return [devices[i * columns : (i + 1) * columns] for i in range(rows)]

    def extract_alpha_beta_for_device_mesh(self) -> tuple[list[float], list[float]]:
        """``mesh_alpha`` and ``mesh_beta`` of that grid: the slowest link along each of its axes."""
        return slowest_links(self.alpha_beta_dict, torch.tensor(self.search_best_logical_mesh()))

    def _islands(self) -> list[list[int]]:
        """Groups of devices that links of about the best bandwidth connect."""
        fastest = min((beta for _, beta in self.alpha_beta_dict.values()), default=0.0)
        limit = fastest * (1 + self.homogeneous_tolerance)
        islands: list[list[int]] = []
        for device in self.physical_devices:
            near = [i for i in islands if any(self.alpha_beta_dict[device, m][1] <= limit for m in i)]
            islands = [i for i in islands if i not in near] + [sorted([*itertools.chain(*near), device])]
        return sorted(islands)


def slowest_links(
    table: Mapping[tuple[int, int], tuple[float, float]], grid: torch.Tensor
) -> tuple[list[float], list[float]]:
    """``mesh_alpha`` and ``mesh_beta`` of a grid of ranks: the slowest link along each of its axes."""
    alpha, beta = [], []
    for axis in range(grid.ndim):
        lines = grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist()
        links = [_link(table, *pair) for line in lines for pair in itertools.combinations(line, 2)]
        alpha.append(max((link[0] for link in links), default=0.0))
        beta.append(max((link[1] for link in links), default=0.0))
    return alpha, beta


def _link(table: Mapping[tuple[int, int], tuple[float, float]], one: int, other: int) -> tuple[float, float]:
    value = table.get((one, other), table.get((other, one)))
    if value is None:
        raise ValueError(f"alpha_beta_dict has no entry for the ranks {one} and {other}")
    if value[0] < 0 or value[1] <= 0:
        raise ValueError(
            f"alpha_beta_dict[{one}, {other}] = {value}: alpha must be at least 0 and beta above 0"
        )
    return value


def _rounds(devices: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """All pairs, in rounds in which every device has a partner, or is alone once if their number is odd.

    So all ranks have made equally many process groups whenever two make one: torch names a group by that
    number, and two ranks with different ones would wait for each other.
    """
    circle: list[int | None] = [*devices, *([None] if len(devices) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        facing = zip(circle, reversed(circle), strict=True)
        pairs = [tuple(sorted(d for d in pair if d is not None)) for pair in facing]
        rounds.append(pairs[: len(circle) // 2])
        circle.insert(1, circle.pop())  # all but the first move on by one place
    return rounds
