"""``ppg``: a rank's place in a pipeline by the names of the RPC engines, read from the launched context."""

from __future__ import annotations

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


class PipelineProcessGroup:
    """Answers questions about the launched job; it makes no groups and starts no workers."""

    def set_global_info(
        self,
        rank: int,
        world_size: int,
        dp_degree: int = 1,
        tp_degree: int = 1,
        num_worker_threads: int = 1,
        device: str = "cuda",
    ) -> None:
        """Compare what a script says about the job with the launch, which decides.

        ``num_worker_threads`` and ``device`` were options of RPC and have no effect.
        """
        if not gpc.is_initialized(ParallelMode.GLOBAL):
            raise RuntimeError(
                "ppg.set_global_info needs a launched job; call colossalai.launch with"
                " parallel=dict(pipeline=...) on every rank"
            )
        said = {"rank": rank, "world_size": world_size, "dp_degree": dp_degree, "tp_degree": tp_degree}
        launched = {
            "rank": self.get_global_rank(),
            "world_size": self.get_world_size(),
            "dp_degree": self.get_dp_degree(),
            "tp_degree": self.get_tp_degree(),
        }
        wrong = [
            f"{key}={said[key]}, but the launch has {launched[key]}"
            for key in said
            if said[key] != launched[key]
        ]
        if wrong:
            raise ValueError(f"ppg.set_global_info got {'; '.join(wrong)}; launch the job in this form")

    def get_global_rank(self) -> int:
        """Return this rank's number in the whole job."""
        return gpc.get_global_rank()

    def get_world_size(self) -> int:
        """Return the number of ranks of the job."""
        return gpc.get_world_size(ParallelMode.GLOBAL)

    def get_dp_degree(self) -> int:
        """Return the number of replicas of the model."""
        return gpc.get_world_size(ParallelMode.DATA)

    def get_tp_degree(self) -> int:
        """Return the number of ranks that share a stage."""
        return gpc.get_world_size(ParallelMode.TENSOR)

    def get_local_pp_rank(self) -> int:
        """Return this rank's place in its pipeline."""
        return gpc.get_local_rank(ParallelMode.PIPELINE)

    def get_local_stage_global_ranks(self) -> list[int]:
        """Return the ranks that share this rank's stage."""
        return gpc.get_ranks_in_group(ParallelMode.TENSOR)


ppg = PipelineProcessGroup()
