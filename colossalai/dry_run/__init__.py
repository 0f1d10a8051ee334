"""A plan at full size without a GPU: every rank's training step on the meta device, and the memory that it
needs.

meta.py      the meta device as a stand-in for a GPU
link.py      a pipeline stage without neighbours
watch.py     what there is at the worst moment
estimate.py  one rank
zero.py      one rank under ZeRO
job.py       all ranks, and the result for people
"""

from colossalai.dry_run.estimate import estimate_memory
from colossalai.dry_run.job import Parts, RankReport, dry_run, format_reports
from colossalai.dry_run.watch import MemoryEstimate

__all__ = ["MemoryEstimate", "Parts", "RankReport", "dry_run", "estimate_memory", "format_reports"]
