"""What is left of the documented names: missing ones with the issue that brings them, other parameters with
the reason, and words of the list that are no names.
"""

from __future__ import annotations


def _all(module: str, names: str, issue: str, reason: str) -> dict[str, tuple[str, str]]:
    return {f"{module}.{name}": (issue, reason) for name in names.split()}


_CACHED = ("no issue", "tables of recommendation models, with a cache on the device; no page shows them")
_OLDER = ("no issue", "moving parts of an older ZeRO-3; ours has the chunks of Gemini in their place")

# name, or module with all that is in it -> (issue, reason)
MISSING: dict[str, tuple[str, str]] = {
    **_all(
        "colossalai.nn.parallel.layers",
        "CachedEmbeddingBag ParallelCachedEmbeddingBag ParallelCachedEmbeddingBagTablewise"
        " ParallelCachedEmbeddingBagTablewiseSpiltCache CachedParamMgr LimitBuffIndexCopyer"
        " TablewiseEmbeddingBagConfig EvictionStrategy",
        *_CACHED,
    ),
    "colossalai.zero.legacy.gemini": _OLDER,
}

_BACKEND = ("backend=None", "None chooses: NCCL for CUDA tensors and gloo for those of the CPU")
_SCALE = "2**32 is far beyond fp16: dozens of steps would be skipped before one is made"
_PINNED = "copies between host and device overlap with computation only from pinned memory"

# name -> (difference, reason)
DIFFERENT: dict[str, tuple[str, str]] = {
    **{
        f"colossalai.{name}": _BACKEND
        for name in ("launch", "launch_from_slurm", "launch_from_openmpi", "launch_from_torch")
    },
    "colossalai.cluster.ProcessGroupManager.create_process_group": _BACKEND,
    "colossalai.booster.Booster": ("device=None", "None is the current device, so a script runs on CPU too"),
    "colossalai.booster.plugin.LowLevelZeroPlugin": (
        "precision=None; initial_scale=65536",
        f"without a precision, that of the booster is used, or fp16; {_SCALE}",
    ),
    "colossalai.booster.plugin.GeminiPlugin": (
        "pin_memory=True; initial_scale=65536",
        f"{_PINNED}; {_SCALE}",
    ),
    "colossalai.zero.GeminiDDP": ("pin_memory=True", _PINNED),
    "colossalai.zero.ZeroDDP": ("pin_memory=True", _PINNED),
    "colossalai.zero.ZeroOptimizer": ("initial_scale=65536", _SCALE),
    "colossalai.zero.legacy.ShardedOptimizerV2": ("initial_scale=65536", _SCALE),
    "colossalai.zero.LowLevelZeroOptimizer.backward": (
        "retain_graph=None",
        "None means the same, as in torch",
    ),
    "colossalai.zero.gemini.ChunkManager": (
        "init_device is not number 2",
        "the second place takes a device, or the process group of page 42",
    ),
    "colossalai.zero.gemini.ChunkManager.reduce_chunk": (
        "needs grads",
        "gradients lie beside a chunk, not in it, so that weights stay while they are reduced",
    ),
}

# Words of the list that are no names: values, files, environment variables, parts of names.
_PROSE = """
    Auto COIN_CMD CPU CUDA Data Distributed Epoch Evaluation Found GLOBAL_BATCH_SIZE HIDDEN_SIZE
    Initializer_ LEVEL LOCAL_RANK LR List MASTER_ADDR MASTER_PORT Model NUM_MICRO_BATCHES
    OMPI_COMM_WORLD_RANK PULP_CBC_CMD Path Pipeline RANK Replica SEQ_LENGTH SLURM_NPROCS SLURM_PROCID
    SPLIT_NODE SUM Skip SpiltCache TENSOR_SHAPE Tablewise Tensor Test Train WORLD_SIZE Your _2D_Col
    _2D_Row _2p5D_ROW _3D_Input _Col _Dep _InputxWeight _LOCAL_RANK _Output _OutputxWeight _SIZE _Weight
    _XZ __ _amp _by_partition _rank _v2 _with_kwargs apex auto behind benchmark bias_initializer bin
    bound callable colo_get comm_actions compute compute_resharding_cost config_dict const convert_to_
    cost cpu_group ctx cuDNN cudnn_benchmark cudnn_deterministic decorator deterministic dict dist dp
    environment exec_func fan_out float float32 forward fp16_apex fp16_naive fp8 front gelu global
    global_meta global_rank_to_process_groups_with_ group_size half in index initialized initializer int
    is is_tensor_parallel json kw last line logical mb meta metrics naive nan no node num_local numpy
    opt orig_cost_dict out overflow padding pipeline_rank pipeline_shared_module_pg
    position_embed_initializer pre process python pytorch_model rank_ register_strategy relu safetensors
    same sched seq_size sequence set_cpu_memory_capacity sharded source source_spec states step_metrics
    steps str strategies_vector strategy swish target test test_dl the to torch torch_ddp total_size
    tp_rank train_dl unsharded wasted
"""
PROSE: set[str] = set(_PROSE.split())
