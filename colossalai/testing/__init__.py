"""Helpers for tests of distributed code; docs/source/en/testing.md shows how they work together."""

from colossalai.context.fake_launch import fake_world
from colossalai.testing._comparison import (
    assert_close,
    assert_close_loose,
    assert_equal,
    assert_equal_in_group,
    assert_not_equal,
    check_state_dict_equal,
)
from colossalai.testing._decorators import (
    clear_cache_before_run,
    parameterize,
    parametrize_sample,
    rerun_if_address_is_in_use,
    rerun_on_exception,
    run_on_environment_flag,
    sample_cases,
    skip_if_not_enough_gpus,
)
from colossalai.testing._spawn import RankError, free_port, spawn

__all__ = [
    "RankError",
    "assert_close",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_not_equal",
    "check_state_dict_equal",
    "clear_cache_before_run",
    "fake_world",
    "free_port",
    "parameterize",
    "parametrize_sample",
    "rerun_if_address_is_in_use",
    "rerun_on_exception",
    "run_on_environment_flag",
    "sample_cases",
    "skip_if_not_enough_gpus",
    "spawn",
]
