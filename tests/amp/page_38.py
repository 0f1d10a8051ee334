"""The sections of page 38, with all the defaults that it lists."""

from __future__ import annotations

from typing import Any

from colossalai.amp import AMP_TYPE

DOCUMENTED: dict[AMP_TYPE, dict[str, Any]] = {
    AMP_TYPE.TORCH: {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    AMP_TYPE.APEX: {
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 16777216.0,
    },
    AMP_TYPE.NAIVE: {
        "log_num_zeros_in_grad": False,
        "initial_scale": 2**32,
        "min_scale": 1,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
    },
}
