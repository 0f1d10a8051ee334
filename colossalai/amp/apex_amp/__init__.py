"""The optimization levels O0 to O3 of NVIDIA Apex, built from the parts of the other modes.

Apex is not needed.
"""

from colossalai.amp.apex_amp.apex_amp import apex_amp
from colossalai.amp.apex_amp.optimizer import ApexAMPOptimizer
from colossalai.amp.apex_amp.options import LEVELS, ApexOptions, Properties

__all__ = ["LEVELS", "ApexAMPOptimizer", "ApexOptions", "Properties", "apex_amp"]
