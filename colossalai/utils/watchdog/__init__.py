"""Reports each rank of a job that stands still: its stacks, the collective it waits in, and who is behind.

``Watchdog`` runs inside a job; ``take_snapshot`` and ``explain`` are its two halves, which
``colossalai.testing.spawn`` uses as well.
"""

from colossalai.utils.watchdog.job import Watchdog
from colossalai.utils.watchdog.report import explain
from colossalai.utils.watchdog.snapshot import Frame, Issued, RankSnapshot, Wait, take_snapshot

__all__ = ["Frame", "Issued", "RankSnapshot", "Wait", "Watchdog", "explain", "take_snapshot"]
