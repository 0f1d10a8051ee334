"""The documented names and their parameters: sections 0.1 to 1.12 of ``api.md``, for a test to read.

A line without an indent is a module.  The entries in the lines below it, which are indented, are found in it;
those that are indented further are members of the entry before them.  ``name`` promises that there is such a
thing, ``name(a, b=1)`` that it takes these parameters, in this order and with these defaults (``...`` is a
default that is not compared).  ``WI``, ``BI`` and ``PEI`` are the initializers of layers.
"""

from __future__ import annotations

SECTIONS: dict[str, str] = {
    "0.1": """
colossalai
    Booster
colossalai.builder
    build_pipeline_model(layers, num_chunks=1, verbose=False)
    build_pipeline_model_from_cfg(config, num_chunks=1, partition_method='parameter', verbose=False)
colossalai.builder.pipeline
    partition_uniform(num_items, pipeline_parallel_size, num_chunks)
colossalai.gemini
    ChunkManager GeminiManager
colossalai.global_variables
    moe_env
colossalai.mixed_precision
    FP16TorchMixedPrecision
colossalai.nn.parallel
    GeminiDDP
colossalai.utils.model.colo_init_context
    ColoInitContext
titans.loss.vocab_cross_entropy
    vocab_parallel_cross_entropy
""",
    "4": """
energonai
    launch_engine(tp_world_size, pp_world_size, master_host, master_port, rpc_port, model_fn, n_nodes=1,
        node_rank=0, batch_manager=None, pipe_size=1, queue_size=0, rpc_disable_shm=True)
    AsyncEngine
        submit(uid, data) wait(uid) get(uid, interval=0.05) shutdown()
    QueueFullError SubmitEntry TaskEntry
    BatchManager
        make_batch(q) split_batch(task_entry)
    BatchManagerForGeneration(max_batch_size=1, pad_token_id=0)
    ListCache(cache_size, list_size, fixed_keys=...)
    MissCacheError
    InferenceEngine(model_class, model_config, model_type, max_batch_size=1, tp_init_size=-1, pp_init_size=-1,
        auto_pp=False, host='localhost', port=29500, dtype=None)
        run(inputs)
    Executor(engine, pad_token_id=0, max_batch_size=1, max_queue_size=0)
        start() submit(inputs, max_tokens, top_k, top_p, temperature) wait teardown()
energonai.model
    gpt2_small gpt2_large gpt2_8B gpt3 hf_gpt2 bert_small bert_large bert_8B bert_175B
    opt_125M opt_6B opt_30B opt_66B opt_175B
""",
    "1.1": """
colossalai
    get_default_parser()
    launch(config, rank, world_size, host, port, backend='nccl', local_rank=None, seed=1024, verbose=True)
    launch_from_slurm(config, host, port, backend='nccl', seed=1024, verbose=True)
    launch_from_openmpi(config, host, port, backend='nccl', seed=1024, verbose=True)
    launch_from_torch(config, backend='nccl', seed=1024, verbose=True)
    initialize(model, optimizer, criterion=None, train_dataloader=None, test_dataloader=None,
        lr_scheduler=None, ophooks=None, verbose=True)
colossalai.core
    global_context
        config verbose world_size data_parallel_size pipeline_parallel_size tensor_parallel_size
        num_processes_on_current_node virtual_pipeline_parallel_size virtual_pipeline_parallel_rank
        load_config(config) detect_num_processes_on_current_node() get_global_rank()
        add_global_rank(parallel_mode, rank) get_local_rank(parallel_mode)
        get_next_global_rank(parallel_mode) get_prev_global_rank(parallel_mode) is_first_rank(parallel_mode)
        is_last_rank(parallel_mode) is_pipeline_first_stage(ignore_virtual=False)
        is_pipeline_last_stage(ignore_virtual=False) get_world_size(parallel_mode) get_group(parallel_mode)
        get_cpu_group(parallel_mode) get_ranks_in_group(parallel_mode)
        init_global_dist(rank, world_size, backend, host, port) check_sanity() init_parallel_groups()
        is_initialized(parallel_mode) destroy() set_device(ordinal=None) set_seed(seed)
        set_virtual_pipeline_parallel_size(size) set_virtual_pipeline_parallel_rank(rank)
colossalai.context
    ParallelContext Config(config) ConfigException SingletonMeta
    ParallelMode
        GLOBAL DATA MODEL PIPELINE TENSOR SEQUENCE SEQUENCE_DP PARALLEL_1D PARALLEL_2D_ROW PARALLEL_2D_COL
        PARALLEL_3D_INPUT PARALLEL_3D_WEIGHT PARALLEL_3D_OUTPUT PARALLEL_3D_INPUT_X_WEIGHT
        PARALLEL_3D_OUTPUT_X_WEIGHT PARALLEL_2P5D_ROW PARALLEL_2P5D_COL PARALLEL_2P5D_DEP PARALLEL_2P5D_XZ
colossalai.context.config
    Config
        update from_file(filename)
    ConfigException
colossalai.context.process_group_initializer
    ProcessGroupInitializer(rank, world_size, config, data_parallel_size, pipeline_parallel_size,
        tensor_parallel_size)
        init_dist_group()
    Initializer_Data Initializer_Model Initializer_Pipeline Initializer_Tensor Initializer_1D Initializer_2D
    Initializer_2p5D(rank, world_size, config, data_parallel_size, pipeline_parallel_size,
        tensor_parallel_size, depth)
    Initializer_3D Initializer_Sequence Initializer_Sequence_DP Initializer_2D_Row Initializer_2D_Col
    Initializer_2p5D_ROW Initializer_2p5D_Col Initializer_2p5D_Dep Initializer_2p5D_XZ Initializer_3D_Input
    Initializer_3D_Weight Initializer_3D_Output Initializer_3D_InputxWeight Initializer_3D_OutputxWeight
colossalai.constants
    ALLOWED_MODES INITIALIZER_MAPPING IS_TENSOR_PARALLEL NUM_PARTITIONS TENSOR_PARALLEL_ATTRIBUTES
colossalai.global_variables
    tensor_parallel_env
        load(mode=None, vocab_parallel=False, parallel_input_1d=False, summa_dim=None, tesseract_dim=None,
            tesseract_dep=None, depth_3d=None, input_group_3d=None, weight_group_3d=None,
            output_group_3d=None, input_x_weight_group_3d=None, output_x_weight_group_3d=None)
        save()
    TensorParallelEnv
colossalai.context.random
    add_seed(parallel_mode, seed, overwrite=False) get_seeds() get_states(copy=False) get_current_mode()
    set_mode(parallel_mode) set_seed_states(parallel_mode, state) sync_states() seed(parallel_mode)
    with_seed(func, parallel_mode) moe_set_seed(seed) reset_seeds() SeedManager
colossalai.context.moe_context
    MoeParallelInfo(ep_size, dp_size)
    MoeContext
        setup(seed, use_kernel_optim=True) get_info(num_experts) set_kernel_not_use() reset_loss()
        add_loss(loss) get_loss() is_initialized parallel_info_dict
    MOE_CONTEXT
""",
    "1.2": """
colossalai.engine
    Engine(model, optimizer, criterion=None, gradient_handlers=None, clip_grad_norm=0.0, ophook_list=None,
        verbose=True, schedule=None)
        ophooks model optimizer criterion schedule uses_pipeline add_hook(ophook) remove_hook(ophook)
        zero_grad() step() backward(loss) backward_by_grad(tensor, grad) __call__
        execute_schedule(data_iter, **kwargs) train() eval()
colossalai.engine.schedule
    BaseSchedule(data_process_func=None)
        load_batch(data_iter, to_gpu=True) pre_processing(engine)
        forward_backward_step(engine, data_iter, forward_only, return_loss=True, return_output_label=True)
    NonPipelineSchedule(data_process_func=None)
    PipelineSchedule(num_microbatches, data_process_func=None, tensor_shape=None,
        scatter_gather_tensors=False)
    InterleavedPipelineSchedule(num_microbatches, num_model_chunks, data_process_func=None,
        tensor_shape=None, scatter_gather_tensors=False)
    get_tensor_shape()
colossalai.engine.schedule._pipeline_schedule_v2
    PipelineScheduleV2(num_microbatches, data_process_func=None, tensor_shape=None,
        scatter_gather_tensors=False)
colossalai.engine.gradient_handler
    BaseGradientHandler(model, optimizer)
        handle_gradient()
    DataParallelGradientHandler(model, optimizer) ZeROGradientHandler(model, optimizer)
    PipelineSharedModuleGradientHandler(model, optimizer) MoeGradientHandler(model, optimizer=None)
    SequenceParallelGradientHandler(model, optimizer)
colossalai.engine.gradient_handler.utils
    bucket_allreduce(param_list, group=None)
colossalai.engine.gradient_accumulation
    accumulate_gradient(model, optimizer, dataloader, accumulate_size, gradient_handlers=None,
        lr_scheduler=None)
    GradAccumOptimizer(optim, accumulate_size, model=None) GradAccumDataloader(dataloader, accumulate_size)
    GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size)
        compute_effective_steps_per_epoch(dataloader, accumulate_size)
    GradAccumGradientHandler(grad_handler, accumulate_size)
colossalai.builder
    build_from_config(module, config) build_from_registry(config, registry)
    build_gradient_handler(config, model, optimizer)
colossalai.registry
    Registry(name, third_party_library=None)
        register_module(module_class) get_module(module_name) has(module_name)
    LAYERS MODELS OPTIMIZERS DATASETS DIST_GROUP_INITIALIZER GRADIENT_HANDLER LOSSES HOOKS TRANSFORMS
    DATA_SAMPLERS LR_SCHEDULERS SCHEDULE OPHOOKS
""",
    "1.3": """
colossalai.trainer
    Trainer(engine, timer=None, logger=None)
        cur_epoch cur_step max_epochs max_steps steps_per_epoch engine
        fit(train_dataloader, epochs, max_steps=None, test_dataloader=None, test_interval=1, hooks=None,
            display_progress=False, return_output_label=True)
        evaluate(test_dataloader, hooks=None, display_progress=False, return_output_label=True)
        predict(data)
colossalai.trainer.hooks
    BaseHook(priority)
        after_hook_is_attached(trainer) before_train(trainer) after_train(trainer) before_train_iter(trainer)
        after_train_iter(trainer, output, label, loss) before_train_epoch(trainer) after_train_epoch(trainer)
        before_test(trainer) after_test(trainer) before_test_epoch(trainer) after_test_epoch(trainer)
        before_test_iter(trainer) after_test_iter(trainer, output, label, loss)
        init_runner_states(trainer, key, val)
    MetricHook(priority) LossHook(priority=0) AccuracyHook(accuracy_func, priority=0)
    ThroughputHook(ignored_steps=0, priority=10, tflop_per_step=0, use_local=False)
    LogMetricByStepHook(priority=10) LogMetricByEpochHook(logger, interval=1, priority=10)
    TensorboardHook(log_dir, ranks=None, parallel_mode=..., priority=10)
    LogTimingByEpochHook(timer, logger, interval=1, priority=10, log_eval=True, ignore_num_train_steps=0)
    LogMemoryByEpochHook(logger, interval=1, priority=10, log_eval=True, report_cpu=False)
    LRSchedulerHook(lr_scheduler, by_epoch, store_lr_in_state=True, priority=1)
    SaveCheckpointHook(interval=1, checkpoint_dir=None, model=None, save_by_iter=False, priority=10)
    Metric(epoch_only)
        reset() update get_last_step_value() get_accumulated_value() is_better(a, b)
    LossMetric(epoch_only) LearningRateMetric(epoch_only, initial_lr=0.0)
    AccuracyMetric(epoch_only, accuracy_func)
    ThroughputMetric(epoch_only, ignored_steps=0, tflop_per_step=0, use_local=False)
""",
    "1.4": """
colossalai.nn
    Linear(in_features, out_features, bias=True, dtype=None, WI, BI, **kwargs)
    Classifier(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI,
        vocab_parallel_limit=2048)
    Embedding(num_embeddings, embedding_dim, padding_idx=None, dtype=None, weight_initializer=...,
        vocab_parallel_limit=2048, *args, **kwargs)
    PatchEmbedding(img_size, patch_size, in_chans, embed_size, dtype=None, flatten=True, WI, BI, PEI)
    LayerNorm(normalized_shape, eps=1e-5, bias=True, dtype=None) Dropout(p=0.5, inplace=False)
    partition_batch(input_)
    Linear1D(in_features, out_features, bias=True, dtype=None, gather_output=False, skip_bias_add=False, WI,
        BI)
    Linear1D_Col(in_features, out_features, bias=True, dtype=None, gather_output=False, skip_bias_add=False,
        WI, BI)
    Linear1D_Row(in_features, out_features, bias=True, dtype=None, parallel_input=True, skip_bias_add=False,
        WI, BI, stream_chunk_num=1)
    Classifier1D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    VocabParallelClassifier1D(in_features, num_classes, weight=None, bias=True, dtype=None,
        gather_output=False, WI, BI)
    Embedding1D(num_embeddings, embedding_dim, padding_idx=None, dtype=None, weight_initializer=..., *args,
        **kwargs)
    VocabParallelEmbedding1D(num_embeddings, embedding_dim, padding_idx=None, dtype=None,
        weight_initializer=..., *args, **kwargs)
    LayerNorm1D(normalized_shape, eps=1e-5, bias=True, dtype=None) Dropout1D(p=0.5, inplace=False)
    PatchEmbedding1D(img_size, patch_size, in_chans, embed_size, dtype=None, flatten=True, WI, BI, PEI)
    Linear2D(in_features, out_features, bias=True, dtype=None, skip_bias_add=False, WI, BI)
    LayerNorm2D(normalized_shape, eps=1e-5, bias=True, dtype=None)
    PatchEmbedding2D(img_size, patch_size, in_chans, embed_size, flatten=True, dtype=None, WI, BI, PEI)
    Embedding2D VocabParallelEmbedding2D
    Classifier2D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    VocabParallelClassifier2D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    split_batch_2d(input_, dim=0) reduce_by_batch_2d(input_, reduce_mean=False)
    Linear2p5D(in_features, out_features, bias=True, dtype=None, skip_bias_add=False, WI, BI)
    LayerNorm2p5D(normalized_shape, eps=1e-5, bias=True, dtype=None)
    PatchEmbedding2p5D(img_size, patch_size, in_chans, embed_size, flatten=True, dtype=None, WI, BI, PEI)
    Embedding2p5D VocabParallelEmbedding2p5D
    Classifier2p5D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    VocabParallelClassifier2p5D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    split_batch_2p5d(input_, dim=0) reduce_by_batch_2p5d(input_, reduce_mean=False)
    Linear3D(in_features, out_features, bias=True, dtype=None, skip_bias_add=False, WI, BI)
    LayerNorm3D(normalized_shape, eps=1e-12, bias=True, dtype=None)
    PatchEmbedding3D(img_size, patch_size, in_chans, embed_size, flatten=True, dtype=None, WI, BI, PEI)
    Embedding3D VocabParallelEmbedding3D
    Classifier3D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    VocabParallelClassifier3D(in_features, num_classes, weight=None, bias=True, dtype=None, WI, BI)
    split_batch_3d(input_, dim=0, input_parallel_mode=..., weight_parallel_mode=...)
    split_tensor_3d(tensor, dim, parallel_mode)
    reduce_by_batch_3d(tensor, input_parallel_mode, weight_parallel_mode, reduce_mean=False)
    TransformerSelfAttentionRing(hidden_size, num_attention_heads, attention_dropout, attention_mask_func,
        layer_number, apply_query_key_layer_scaling=False, convert_fp16_to_fp32_in_softmax=False,
        attn_mask_type=..., masked_softmax_fusion=True, fp16=False, bf16=False)
    AttnMaskType RingQK(sub_q, sub_k, batch_size, num_attention_heads, sub_seq_length)
    RingAV(attention_score, sub_v, batch_size, num_attention_heads, attention_head_size, sub_seq_length)
    VanillaLinear VanillaClassifier VanillaLayerNorm VanillaPatchEmbedding DropPath(drop_prob=None)
    WrappedDropout(p=0.5, inplace=False, mode=None) WrappedDropPath(p=0.0, mode=None)
    PipelineSharedModuleWrapper(pipeline_ranks)
        register_module(module) register_parameter(param)
    Experts(expert_cls, num_experts, **expert_args)
    FFNExperts(num_experts, d_model, d_ff, activation=None, drop_rate=0)
    TPExperts(num_experts, d_model, d_ff, activation=None, drop_rate=0) MoeExperts(comm_name, num_experts)
    MoeLayer(dim_model, num_experts, router, experts)
    MoeModule(dim_model, num_experts, top_k=1, capacity_factor_train=1.25, capacity_factor_eval=2.0,
        min_capacity=4, noisy_policy=None, drop_tks=True, use_residual=False, residual_instance=None,
        expert_instance=None, expert_cls=None, **expert_args)
    MoeRouter
    Top1Router(capacity_factor_train=1.25, capacity_factor_eval=2.0, min_capacity=4, select_policy='first',
        noisy_func=None, drop_tks=True)
    Top2Router(capacity_factor_train=1.25, capacity_factor_eval=2.0, min_capacity=4, noisy_func=None,
        drop_tks=True)
    NormalNoiseGenerator(num_experts) UniformNoiseGenerator(eps=1e-2)
    build_ffn_experts(num_experts, d_model, d_ff, activation=None, drop_rate=0) save_moe_model(model, path)
    load_moe_model(model, path)
    CheckpointModule(checkpoint=True, offload=False)
        _forward
    divide(numerator, denominator) ACT2FN
    set_tensor_parallel_attribute_by_size(param, size)
    set_tensor_parallel_attribute_by_partition(param, num_partitions) get_tensor_parallel_mode() to_2tuple
    CrossEntropyLoss(reduction=True, *args, **kwargs) CrossEntropyLoss2D(reduction=True, *args, **kwargs)
    CrossEntropyLoss2p5D(reduction=True, *args, **kwargs) CrossEntropyLoss3D(reduction=True, *args, **kwargs)
    VocabParallelCrossEntropyLoss1D(reduction=True) VocabParallelCrossEntropyLoss2D(reduction=True)
    VocabParallelCrossEntropyLoss2p5D(reduction=True) VocabParallelCrossEntropyLoss3D(reduction=True)
    MoeCrossEntropyLoss(aux_weight=0.01, *args, **kwargs) MoeLoss(aux_weight, loss_fn, *args, **kwargs)
    Accuracy() Accuracy2D() Accuracy2p5D() Accuracy3D()
colossalai.nn.layer.colossalai_layer
    Linear Classifier Embedding PatchEmbedding LayerNorm Dropout partition_batch
    ColossalaiModule(module, **kwargs)
colossalai.nn.layer.utils
    CheckpointModule divide ACT2FN set_tensor_parallel_attribute_by_size
    set_tensor_parallel_attribute_by_partition get_tensor_parallel_mode _ntuple to_2tuple
colossalai.nn.layer.base_layer
    ParallelLayer
        global_state_dict use_local_state_dict()
colossalai.nn.init
    zeros_() ones_() uniform_(a=0.0, b=1.0) normal_(mean=0.0, std=1.0)
    trunc_normal_(mean=0.0, std=1.0, a=-2.0, b=2.0)
    kaiming_uniform_(a=0, mode='fan_in', nonlinearity='leaky_relu')
    kaiming_normal_(a=0, mode='fan_in', nonlinearity='leaky_relu')
    xavier_uniform_(a=math.sqrt(3.0), scale=2.0, gain=1.0) xavier_normal_(scale=2.0, gain=1.0)
    lecun_uniform_() lecun_normal_()
colossalai.nn.loss
    CrossEntropyLoss CrossEntropyLoss2D CrossEntropyLoss2p5D CrossEntropyLoss3D
    VocabParallelCrossEntropyLoss1D VocabParallelCrossEntropyLoss2D VocabParallelCrossEntropyLoss2p5D
    VocabParallelCrossEntropyLoss3D MoeCrossEntropyLoss MoeLoss
colossalai.nn.metric
    Accuracy Accuracy2D Accuracy2p5D Accuracy3D calc_acc(logits, targets)
colossalai.nn.parallel
    ColoDDP(module, process_group, bucket_cap_mb=25, rebuild_bucket=True)
        set_params_to_ignore(params_to_ignore)
colossalai.nn.parallel.layers
    ColoModule ColoLinear ColoEmbedding register_colo_module is_colo_module get_colo_module
    init_colo_module(module, compute_spec, pg, recursive=True, mode='default') check_colo_module
    CachedEmbeddingBag ParallelCachedEmbeddingBag ParallelCachedEmbeddingBagTablewise
    ParallelCachedEmbeddingBagTablewiseSpiltCache CachedParamMgr LimitBuffIndexCopyer
    TablewiseEmbeddingBagConfig
    EvictionStrategy
        LFU DATASET
colossalai.nn._ops
    colo_addmm colo_batch_norm colo_embedding colo_embedding_bag colo_layernorm colo_linear
    colo_cross_entropy colo_view set_parallel_input get_parallel_input
""",
    "1.5": """
colossalai.nn.optimizer
    ColossalaiOptimizer(optim)
        backward(loss) backward_by_grad(tensor, grad) clip_grad_norm(model, max_norm)
    FusedAdam(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adamw_mode=True,
        weight_decay=0.0, amsgrad=False, set_grad_none=True)
        step(closure=None, *, div_scale=-1)
    FusedLAMB(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
        amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0,
        use_nvlamb=False)
    FusedSGD(params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False)
    Lamb(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0, adam=False)
    Lars(params, lr=1e-3, momentum=0, eeta=1e-3, weight_decay=0, epsilon=0.0)
    CPUAdam(model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
        adamw_mode=True, nvme_offload_fraction=0.0, nvme_offload_dir=None)
        step(closure=None, div_scale=-1)
    HybridAdam(model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
        adamw_mode=True, nvme_offload_fraction=0.0, nvme_offload_dir=None, **defaults)
        step(closure=None, div_scale=-1)
    NVMeOptimizer(params, defaults, nvme_offload_fraction=0.0, offload_dir=None)
colossalai.nn.lr_scheduler
    CosineAnnealingLR(optimizer, total_steps, eta_min=0, last_epoch=-1, **kwargs)
    CosineAnnealingWarmupLR(optimizer, total_steps, warmup_steps=0, eta_min=0.0, last_epoch=-1)
    FlatAnnealingLR(optimizer, total_steps, pct_start=0.72, last_epoch=-1)
    FlatAnnealingWarmupLR(optimizer, total_steps, warmup_steps=0, pct_start=0.72, eta_min=0)
    LinearWarmupLR(optimizer, total_steps, warmup_steps=0)
    MultiStepLR(optimizer, total_steps, milestones=None, gamma=0.1)
    MultiStepWarmupLR(optimizer, total_steps, warmup_steps=0, milestones=None, gamma=0.1)
    OneCycleLR(optimizer, total_steps, pct_start=0.3, anneal_strategy='cos', cycle_momentum=True,
        base_momentum=0.85, max_momentum=0.95, div_factor=25.0, final_div_factor=10000.0)
    PolynomialLR(optimizer, total_steps, end_lr=0.0001, power=1.0)
    PolynomialWarmupLR(optimizer, total_steps, warmup_steps=0, end_lr=0.0001, power=1.0)
    LambdaLR(optimizer, total_steps, lr_lambda=None) MultiplicativeLR(optimizer, total_steps, lr_lambda=None)
    StepLR(optimizer, total_steps, step_size=1, gamma=0.1) ExponentialLR(optimizer, total_steps, gamma=1.0)
colossalai.nn.lr_scheduler.delayed
    DelayerScheduler WarmupScheduler WarmupDelayerScheduler
colossalai.amp
    AMP_TYPE
        APEX TORCH NAIVE
    convert_to_amp(model, optimizer, criterion, mode, amp_config=None)
    convert_to_apex_amp convert_to_naive_amp convert_to_torch_amp
colossalai.amp.naive_amp
    NaiveAMPModel(model, output_to_fp32=True, parallel_mode=..., sync_buffer=True)
    NaiveAMPOptimizer(optim, *args, **kwargs)
    FP16Optimizer(optimizer, grad_scaler, verbose=False, clip_grad_norm=0, dp_process_group=None,
        mp_process_group=None)
colossalai.amp.naive_amp.grad_scaler
    BaseGradScaler(initial_scale, verbose) ConstantGradScaler
    DynamicGradScaler(initial_scale=2**16, growth_factor=2, backoff_factor=0.5, growth_interval=1000,
        min_scale=None, max_scale=None, hysteresis=2, verbose=False)
colossalai.amp.torch_amp
    TorchAMPOptimizer TorchAMPModel TorchAMPLoss
colossalai.amp.torch_amp._grad_scaler
    GradScaler(init_scale=2**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True)
""",
    "1.6": """
colossalai.booster
    Booster(device='cuda', mixed_precision=None, plugin=None)
        boost(model, optimizer, criterion=None, dataloader=None, lr_scheduler=None) backward(loss, optimizer)
        execute_pipeline(data_iter, model, criterion, optimizer, return_loss=True, return_outputs=False)
        no_sync(model) load_model(model, checkpoint, strict=True)
        save_model(model, checkpoint, prefix=None, shard=False, size_per_shard=1024)
        load_optimizer(optimizer, checkpoint)
        save_optimizer(optimizer, checkpoint, shard=False, size_per_shard=1024)
        save_lr_scheduler(lr_scheduler, checkpoint) load_lr_scheduler(lr_scheduler, checkpoint)
    Accelerator(device)
        bind() configure_model(model)
colossalai.booster.plugin
    Plugin
        supported_devices() supported_precisions() control_precision() control_device() support_no_sync()
        configure(model, optimizer, criterion=None, dataloader=None, lr_scheduler=None)
        control_checkpoint_io() get_checkpoint_io() no_sync(model)
        prepare_dataloader(dataset, batch_size, shuffle=False, seed=1024, drop_last=False, pin_memory=False,
            num_workers=0, **kwargs)
    DPPluginBase
    TorchDDPPlugin(broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False,
        check_reduction=False, gradient_as_bucket_view=False, static_graph=False)
    TorchFSDPPlugin(process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None,
        backward_prefetch=None, mixed_precision=None, ignored_modules=None, param_init_fn=None,
        sync_module_states=False)
    LowLevelZeroPlugin(stage=1, precision='fp16', initial_scale=2**32, min_scale=1, growth_factor=2,
        backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=2**32, max_norm=0.0, norm_type=2.0,
        reduce_bucket_size_in_m=12, communication_dtype=None, overlap_communication=True, cpu_offload=False,
        verbose=False)
    GeminiPlugin(device=None, placement_policy='cpu', pin_memory=False, force_outputs_fp32=False,
        strict_ddp_mode=False, search_range_mb=32, hidden_dim=None, min_chunk_size_mb=32, memstats=None,
        gpu_margin_mem_ratio=0.0, initial_scale=2**32, min_scale=1, growth_factor=2, backoff_factor=0.5,
        growth_interval=1000, hysteresis=2, max_scale=2**32, max_norm=0.0, norm_type=2.0, verbose=False)
colossalai.booster.mixed_precision
    mixed_precision_factory
    FP16TorchMixedPrecision(init_scale=2**16, growth_factor=2, backoff_factor=0.5, growth_interval=2000)
    FP16ApexMixedPrecision(opt_level='O1', cast_model_type=None, patch_torch_functions=None,
        keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None,
        num_losses=1, verbosity=1, min_loss_scale=None, max_loss_scale=2.0**24)
    FP16NaiveMixedPrecision(log_num_zeros_in_grad, initial_scale, growth_factor, backoff_factor, hysteresis,
        max_scale, verbose=None)
    BF16MixedPrecision FP8MixedPrecision
    MixedPrecision
        configure(model, optimizer=None, criterion=None)
colossalai.interface
    ModelWrapper(module)
        unwrap()
    OptimizerWrapper(optim)
        backward(loss) clip_grad_by_value(clip_value)
        clip_grad_by_norm(max_norm, norm_type=2.0, error_if_nonfinite=False) scale_loss unscale_grad
colossalai.checkpoint_io
    CheckpointIO
        load_model(model, checkpoint, strict=True)
        save_model(model, checkpoint, shard=False, gather_dtensor=True, variant=None, size_per_shard=1024,
            use_safetensors=False)
        load_optimizer(optimizer, checkpoint)
        save_optimizer(optimizer, checkpoint, shard=False, gather_dtensor=True, prefix=None,
            size_per_shard=1024)
        save_lr_scheduler(lr_scheduler, checkpoint) load_lr_scheduler(lr_scheduler, checkpoint)
        load_sharded_model load_unsharded_model save_sharded_model save_unsharded_model
        load_sharded_optimizer load_unsharded_optimizer save_sharded_optimizer save_unsharded_optimizer
    GeneralCheckpointIO
    CheckpointIndexFile(root_path=None)
        from_file load export append_weight_map append_meta_data contains_dtensor get_checkpoint_fileanames
        assert_no_dtensor_checkpoint get_checkpoint_file get_all_param_names write_index_file
colossalai.checkpoint_io.utils
    get_shard_filename(weights_name, idx) shard_checkpoint(state_dict, max_shard_size=1024)
    calculate_tensor_size is_safetensors_available has_index_file save_state_dict load_shard_state_dict
    add_variant get_base_filenames
colossalai.utils.checkpoint_io
    save(path, model, optimizer=None, param_to_os=None, dist_meta=None, max_shard_size_gb=0.0,
        overwrite=False, backend='disk', **kwargs)
    load(path, model, optimizer=None, redist_meta=None, dist_metas=None, max_shard_size_gb=0.0,
        backend='disk')
    merge(path, output_path) redist(path, output_path, redist_meta, dist_metas) ParamDistMeta
    ParamRedistMeta RankRedistMeta PipelineRedistMeta RedistMeta
colossalai.utils
    save_checkpoint(file, epoch, model, optimizer=None, lr_scheduler=None, **kwargs)
    load_checkpoint(file, model, optimizer=None, lr_scheduler=None, strict=True)
""",
    "1.7": """
colossalai.zero
    zero_model_wrapper(model, zero_stage=1, gemini_config=None, verbose=False)
    zero_optim_wrapper(model, optimizer, initial_scale=2**16, growth_factor=2, backoff_factor=0.5,
        growth_interval=1000, hysteresis=2, min_scale=1, max_scale=2**32, max_norm=0.0, norm_type=2.0,
        optim_config=None, verbose=False)
    ColoInitContext(device=..., dtype=..., default_pg=None, default_dist_spec=None)
    post_process_colo_init_ctx
    GeminiDDP(module, device, placement_policy='cpu', pin_memory=False, force_outputs_fp32=False,
        strict_ddp_mode=False, scatter_after_inference=True, search_range_mb=32, hidden_dim=None,
        min_chunk_size_mb=32, memstats=None, verbose=False)
        state_dict(destination=None, prefix='', keep_vars=False, only_rank_0=True, dtype=...)
        state_dict_shard(prefix='', keep_vars=False, max_shard_size=1024, only_rank_0=True, dtype=...)
        backward(loss) zero_grad
    ZeroDDP(module, gemini_manager, pin_memory=False, force_outputs_fp32=False, strict_ddp_mode=False,
        scatter_after_inference=True)
    ZeroOptimizer(optim, module, gpu_margin_mem_ratio=0.0, initial_scale=2**32, min_scale=1,
        growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=2**32,
        clipping_norm=0.0, norm_type=2.0, verbose=False, **defaults)
    GeminiAdamOptimizer(model, **defaults)
    get_static_torch_model(zero_ddp_model, device=..., dtype=..., only_rank_0=True)
    LowLevelZeroOptimizer(optimizer, initial_scale=2**16, min_scale=1, growth_factor=2.0, backoff_factor=0.5,
        growth_interval=2000, hysteresis=2, max_scale=2**24, clip_grad_norm=0.0, verbose=False,
        reduce_bucket_size=1024 * 1024, communication_dtype=None, overlap_communication=False,
        partition_grad=False, cpu_offload=False, forced_dtype=None)
        backward(loss, retain_graph=False, sync_grad=True) zero_grad step
colossalai.zero.gemini
    GeminiManager(placement_policy, chunk_manager, memstats=None)
        need_warmup is_warmup() memstats pre_iter(*args) post_iter() adjust_layout(chunks) default_device
        sample_overall_data() record_model_data_volume() chunk_manager cuda_margin_mem
        is_cuda_margin_mem_avail get_default_device(policy_name)
    ChunkManager(chunk_configuration, init_device=None)
        register_tensor(tensor, group_type, config_key, cpu_offload=False, pin_memory=False)
        close_all_groups() access_chunk(chunk) release_chunk(chunk)
        move_chunk(chunk, device, force_copy=False) trans_tensor_state(tensor, state) reduce_chunk(chunk)
        fake_release_chunk(chunk) copy_tensor_to_chunk_slice(tensor, data) get_chunk(tensor)
        get_cuda_movable_chunks get_chunks(tensors) add_extern_static_tensor(tensor)
    Chunk(chunk_size, process_group, dtype, init_device=None, cpu_shard_init=False, keep_gathered=False,
        pin_memory=False)
    TensorState
        FREE COMPUTE HOLD HOLD_AFTER_BWD READY_FOR_REDUCE
    ChunkFullError STATE_TRANS
    search_chunk_configuration(model, search_range_mb, search_interval_byte, min_chunk_size_mb=32,
        filter_exlarge_params=True, strict_ddp_flag=False, memstas=None)
    init_chunk_manager(model, init_device=None, hidden_dim=None, verbose=False, **kwargs)
    classify_params_by_dp_degree
    CPUPlacementPolicy CUDAPlacementPolicy
    AutoPlacementPolicy
        _warmup_non_model_data_ratio _steady_cuda_cap_ratio set_warmup_non_model_data_ratio(ratio)
        set_steady_cuda_cap_ratio(ratio)
    ConstPlacementPolicy
        set_const_memory_boundary(cuda_memory_mb)
    PlacementPolicyFactory
        create(policy_name) get_policy_names() get_default_device(policy_name)
colossalai.zero.gemini.memory_tracer
    MemStats AsyncMemoryMonitor(power=10) SyncCudaMemoryMonitor MemStatsCollector ChunkMemStatsCollector
    StaticMemStatsCollector OrderedParamGenerator RuntimeMemTracer(module, dtype=...)
colossalai.zero.legacy
    ZeroInitContext(target_device, shard_strategy, seed=1023, shard_param=False, default_dtype=None,
        model_numel_tensor=...)
    no_shard_zero_context(is_replicated=True) no_shard_zero_decrator TensorShardStrategy
    BucketTensorShardStrategy
    ShardedModelV2(module, shard_strategy, process_group=None, reduce_scatter_process_group=None,
        reduce_scatter_bucket_size_mb=25, fp32_reduce_scatter=False, tensor_placement_policy='cuda',
        gradient_predivide_factor=1.0, reuse_fp16_shard=False)
    ShardedOptimizerV2(sharded_model, optimizer, gpu_margin_mem_ratio=0.0, initial_scale=2**32)
    convert_to_zero_v2(model, optimizer, model_config, optimizer_config)
colossalai.zero.legacy.gemini
    StatefulTensor StatefulTensorMgr
    TensorState
        FREE HOLD HOLD_AFTER_FWD HOLD_AFTER_BWD COMPUTE
    CPUTensorPlacementPolicy CUDATensorPlacementPolicy AutoTensorPlacementPolicy BaseOpHook
    register_ophooks_recursively
""",
    "1.8": """
colossalai.tensor
    ProcessGroup(rank=None, ranks=None, tp_degree=None, dp_degree=None)
        rank() ranks_in_group() world_size() tp_rank_list() dp_rank_list() tp_local_rank() dp_local_rank()
        tp_world_size() dp_world_size() tp_process_group() dp_process_group() cpu_tp_process_group()
        cpu_dp_process_group() set_cpu_groups() has_cpu_groups get_ranks_in_tp() get_ranks_in_dp()
    ColoTensor(data, spec=None)
        from_torch_tensor(tensor, spec=None) get_process_group() set_process_group(pg) get_tp_world_size()
        get_dp_world_size() set_dist_spec(dist_spec) set_tensor_spec(dist_spec, compute_spec)
        has_compute_spec() has_compute_pattern(compute_pattern) is_model_data()
        redistribute(dist_spec, pg=None) to_replicate() to_replicate_() size_local size_global
        numel_global() is_replicate() is_shard_1dcol() is_shard_1drow() is_sharded()
    ColoParameter(data=None, requires_grad=True, spec=None)
    ColoTensorSpec(pg, dist_attr=..., compute_attr=None) ShardSpec(dims, num_partitions) ReplicaSpec()
    ComputePattern
        TP1D TP2D TP2P5D TP3D
    ComputeSpec(compute_pattern)
        set_output_replicate(flag=True)
    DistSpecManager
        no_grad()
    ColoParamOpHook
        pre_forward post_forward pre_backward post_backward
    ColoParamOpHookManager
        use_hooks(*hooks)
    named_params_with_colotensor convert_parameter
colossalai.tensor.op_wrapper
    colo_op_impl(func)
colossalai.tensor.sharding_spec
    ShardingSpec(device_mesh, entire_shape, dim_partition_dict=None, sharding_sequence=None)
        convert_dict_to_shard_sequence() convert_shard_sequence_to_dict() sharding_sequence_difference(other)
        get_sharded_shape_per_device()
    _DimSpec ALLGATHER_COST SHARD_COST STEP_PENALTY NAN ShardingSpecException ShardingOutOfIndexError
    DuplicatedShardingDimensionError ShardingNotDivisibleError
colossalai.tensor.shape_consistency
    ShapeConsistencyManager
        get_all_all_gather_spec get_all_all_to_all_spec get_all_shard_spec get_all_mix_gather_spec
        get_all_one_step_transform_spec mem_cost shape_consistency apply apply_for_autoparallel_runtime
        cached_spec_pairs_transform_path forward_only options
    ShapeConsistencyOptions set_shape_consistency_options to_global
colossalai.tensor.comm_spec
    CommSpec(comm_pattern, sharding_spec, gather_dim=None, shard_dim=None, logical_process_axis=None,
        forward_only=False, mix_gather=False)
        get_comm_cost() covert_spec_to_action(tensor)
    CollectiveCommPattern
        GATHER_FWD_SPLIT_BWD ALL2ALL_FWD_ALL2ALL_BWD SPLIT_FWD_GATHER_BWD ALLREDUCE_FWD_IDENTITY_BWD
        IDENTITY_FWD_ALLREDUCE_BWD MIXGATHER_FWD_SPLIT_BWD
colossalai.tensor.d_tensor.sharding_spec
    ShardingSpec(dim_size, dim_partition_dict=None, sharding_sequence=None)
        spec_diff
colossalai.tensor.d_tensor.layout
    Layout(device_mesh, device_type, sharding_spec, entire_shape)
colossalai.tensor.d_tensor.layout_converter
    LayoutConverter
        all_gather_transform_layouts all_to_all_transform_layout shard_transform_layout
        get_all_one_step_transform_spec layout_converting get_total_comm_cost apply
colossalai.tensor.d_tensor.d_tensor
    DTensor(local_tensor, dist_layout)
        layout_convert to_local() to_global()
    distribute_tensor distribute_module construct_default_sharding_spec
colossalai.device.device_mesh
    DeviceMesh(physical_mesh_id, mesh_shape=None, logical_mesh_id=None, mesh_alpha=None, mesh_beta=None,
        init_process_group=False, need_flatten=True)
        shape num_devices logical_mesh_id flatten() create_process_groups_for_logical_mesh()
        global_rank_to_logical_rank global_rank_to_process_groups_with_logical_rank
        global_rank_to_process_groups_with_global_rank all_gather_cost(num_bytes, mesh_dim)
        all_reduce_cost(num_bytes, mesh_dim) reduce_scatter_cost(num_bytes, mesh_dim)
        all_to_all_cost(num_bytes, mesh_dim) convert_map process_groups_dict
colossalai.device
    AlphaBetaProfiler(physical_devices, alpha_beta_dict=None, ctype='a', warmup=5, repeat=25,
        latency_iters=5, homogeneous_tolerance=0.1)
        profile_ab search_best_logical_mesh extract_alpha_beta_for_device_mesh
    alpa_dp(num_layers, num_devices, num_microbatches, submesh_choices, num_autosharding_configs,
        compute_cost, gap=1e-6)
    get_submesh_choices
""",
    "1.9": """
colossalai.auto_parallel.tensor_shard.initialize
    autoparallelize(model, meta_args=None, data_loader=None, data_process_func=None, alpha_beta_dict=None,
        logical_mesh_shape=None, logical_mesh_id=None, solver_preference='standard',
        dataloader_option='replicated', shard_option='standard', save_solver_solution=False,
        load_solver_solution=False, solver_solution_path=None, return_solution=False, memory_budget=-1.0)
    initialize_model(model, meta_args, device_mesh, memory_budget=-1.0, overlap=False,
        solver_preference='standard', dataloader_option='replicated', shard_option='standard',
        save_solver_solution=False, load_solver_solution=False, solution_path=None, return_solution=False)
    initialize_device_mesh(world_size=-1, physical_devices=None, alpha_beta_dict=None,
        logical_mesh_shape=None, logical_mesh_id=None)
    build_strategy_constructor solve_solution transform_to_sharded_model extract_meta_args_from_dataloader
    extract_alpha_beta_for_device_mesh ModuleWrapper
colossalai.auto_parallel.tensor_shard.options
    SolverPerference
        STANDARD DP TP
    ShardOption
        STANDARD SHARD SHARD_LAST_AXIS FULL_SHARD
    DataloaderOption
        REPLICATED DISTRIBUTED
    SolverOptions(solver_perference, dataloader_option, shard_option)
colossalai.auto_parallel.tensor_shard.solver
    GraphAnalyser(gm)
        liveness_analysis
    StrategiesConstructor(graph, device_mesh, solver_options)
        build_strategies_and_cost
    CostGraph(leaf_strategies, simplify=True, forward_only=False)
    Solver(graph, strategies_constructor, cost_graph, graph_analyser=None, memory_budget=-1.0,
        solution_numbers=1, forward_only=False, memory_increasing_coefficient=1.3, verbose=False)
        call_solver_serialized_args()
colossalai.auto_parallel.tensor_shard.sharding_strategy
    ShardingStrategy(name, sharding_specs, compute_cost, communication_cost, memory_cost,
        communication_actions, resharding_costs)
    OperationData(name, type, data, logical_shape)
    OperationDataType
        INPUT ARG PARAM BUFFER OUTPUT
    TrainCycleItem(fwd, bwd, total) MemoryCost(activation, parameter, temp, buffer) CommAction
    CommType
        BEFORE AFTER HOOK IMPLICIT
    StrategiesVector
colossalai.auto_parallel.checkpoint
    CheckpointSolverChen(graph, cnode=None, num_grids=6)
        solve()
    CheckpointSolverRotor(graph, free_memory=-1, cnode=None, memory_slots=500, optim_multiplier=1.0)
        solve(force_python=False, verbose=False) print_chain print_sequence
    CheckpointSolverBase(graph, free_memory=-1.0, requires_linearize=False, cnode=None, optim_multiplier=1.0)
colossalai.auto_parallel.checkpoint.operation
    Chain Forward ForwardEnable ForwardNograd ForwardCheck Forwards Backward Loss WriteMemory ReadMemory
    DiscardMemory Sequence
colossalai.auto_parallel.offload.mem_optimize
    memory_optimize(model, inps, memory_budget=-1.0, solver_name='asyn')
colossalai.fx
    ColoTracer(trace_act_ckpt=False)
    symbolic_trace(root, concrete_args=None, meta_args=None, trace_act_ckpt=False)
    meta_trace(module, fake_device=None, *args) ColoGraphModule MetaInfoProp
    metainfo_trace(gm, *args, verbose=False, unit='MB') is_compatible_with_meta compatibility
colossalai.fx.passes
    balanced_split_pass balanced_split_pass_v2 uniform_split_pass avgnode_split_pass avgcompute_split_pass
    gpipe_dp_split_pass split_with_split_nodes_pass column_shard_linear_pass row_shard_linear_pass
    transformer_mlp_pass
colossalai._analyzer.fx.tracer.tracer
    ColoTracer(trace_act_ckpt, bias_addition_split)
colossalai._analyzer.fx.passes
    shape_prop_pass
colossalai._analyzer.fx
    symbolic_profile
""",
    "1.10": """
colossalai.pipeline
    PipelinableContext(policy='balanced')
        policy layers_count funcs_count to_layer_list(exec_seq=None)
        partition(num_chunks, pipeline_size, rank)
    PipelinableModel(module_list, front_func_dict, behind_func_dict)
    LayerSpec(typename, *module_args, **module_kwargs)
        build() param_count set_children(children) count_params() reset_param_count()
colossalai.pipeline.utils
    partition_uniform(num_items, pipeline_parallel_size, num_chunks)
    partition_balanced(weights, pipeline_parallel_size, num_chunks) customized_partition(exec_seq)
    build_kwargs_for_module build_kwargs_for_function exec_func_with_kwargs exec_funcs_with_kwargs call_module
colossalai.pipeline.rpc
    FillDrainPipelineEngine(partition_fn, stage_num, num_microbatches, device, chunk=1, criterion=None,
        metric=None, checkpoint=False, data_process_func=None)
    OneFOneBPipelineEngine(partition_fn, stage_num, num_microbatches, device, chunk=1, criterion=None,
        metric=None, checkpoint=False, data_process_func=None)
    ChimeraPipelineEngine(partition_fn, stage_num, num_microbatches, device, chunk=1, criterion=None,
        metric=None, checkpoint=False, data_process_func=None)
colossalai.pipeline.pipeline_process_group
    ppg
colossalai.pipeline.middleware
    Topo Partition PartitionInputVal PartitionOutputVal
colossalai.pipeline.middleware.adaptor
    get_fx_topology
colossalai.communication
    all_gather(tensor, dim, parallel_mode, async_op=False)
    reduce_scatter(tensor, dim, parallel_mode, op=...) all_reduce(tensor, parallel_mode, op=...)
    broadcast(tensor, src, parallel_mode) reduce(tensor, dst, parallel_mode, op=...) scatter_object_list
    send_forward recv_forward send_backward recv_backward send_forward_recv_backward
    send_backward_recv_forward send_forward_recv_forward send_backward_recv_backward
    send_forward_backward_recv_forward_backward ring_forward(tensor_send_next, parallel_mode) send_obj_meta
    recv_obj_meta split_tensor_into_1d_equal_chunks gather_split_1d_tensor
colossalai.communication.p2p_v2
    send_forward recv_forward send_backward recv_backward
""",
    "1.12": """
colossalai.utils
    checkpoint(function, activation_offload, *args, use_reentrant=True) load_checkpoint save_checkpoint
    clip_grad_norm_fp32(parameters, max_norm, norm_type=2) count_zeros_fp32 conditional_context
    copy_tensor_parallel_attributes disposable ensure_path_exists is_ddp_ignored is_dp_rank_0 is_tp_rank_0
    is_no_pp_or_last_stage is_model_parallel_parameter is_using_ddp is_using_pp is_using_sequence
    multi_tensor_applier param_is_not_tensor_parallel_duplicate print_rank_0
    switch_virtual_pipeline_parallel_rank sync_model_param empty_cache get_current_device set_to_cuda
    synchronize DataParallelSampler(dataset, shuffle=False, seed=0, drop_last=False)
    get_dataloader(dataset, shuffle=False, seed=1024, add_sampler=True, drop_last=False, pin_memory=False,
        num_workers=0, **kwargs)
    colo_device_memory_capacity colo_device_memory_used colo_get_cpu_memory_capacity
    colo_set_cpu_memory_capacity colo_set_process_memory_fraction
    report_memory_usage(message, logger=None, report_cpu=False)
    TensorDetector(show_info=True, log=None, include_cpu=False, module=None) Timer MultiTimer(on=True)
colossalai.utils.model.lazy_init_context
    LazyInitContext
colossalai.utils.model.experimental
    LazyInitContext LazyTensor
colossalai.utils.profiler
    profile
colossalai.utils.rank_recorder
    recorder
colossalai.utils.multi_tensor_apply
    multi_tensor_applier
colossalai.cluster
    DistCoordinator
        rank world_size local_rank is_master(process_group=None) is_node_master()
        is_last_process(process_group=None) print_on_master(msg, process_group=None)
        print_on_node_master(msg) priority_execution(executor_rank=0, process_group=None)
        destroy(process_group=None) block_all(process_group=None) on_master_only(process_group=None)
    ProcessGroupManager
        create_process_group(name, ranks, backend='nccl') get(name) destroy(name) destroy_all()
    DeviceMeshManager
        create_device_mesh(name, device_mesh_info) get(name) destroy(name) destroy_all()
    DeviceMeshInfo(physical_ids, mesh_shape=None)
colossalai.testing
    assert_equal assert_not_equal assert_close assert_close_loose assert_equal_in_group
    check_state_dict_equal(d1, d2, ignore_device=True) parameterize(argument, values)
    rerun_on_exception(exception_type=..., pattern=None, max_try=5) rerun_if_address_is_in_use()
    skip_if_not_enough_gpus(min_gpus) free_port() spawn(func, nprocs=1, **kwargs) clear_cache_before_run()
    run_on_environment_flag(name)
colossalai.testing.random
    seed_all(seed, cuda_deterministic=False)
colossalai.logging
    get_dist_logger(name='colossalai')
    DistributedLogger
        set_level(level) log_to_file(path, mode='a', level='INFO', suffix=None)
        info(message, parallel_mode=..., ranks=None) warning(message, parallel_mode=..., ranks=None)
        debug(message, parallel_mode=..., ranks=None) error(message, parallel_mode=..., ranks=None)
    disable_existing_loggers(include=None, exclude=...)
colossalai.kernel
    LayerNorm FusedScaleMaskSoftmax
    MultiHeadAttention(hidden_size, nhead, batch_size, max_seq_len, dropout=0.0, norm_first=False, fp16=True,
        pg=None)
colossalai.kernel.jit
    bias_dropout_add_fused_train bias_dropout_add_fused_inference bias_gelu_impl set_jit_fusion_options
    warmup_jit_fusion
colossalai.kernel.op_builder
    CPUAdamBuilder
        load()
    FusedOptimBuilder LayerNormBuilder MOEBuilder MultiHeadAttnBuilder ScaledMaskedSoftmaxBuilder
    ScaledUpperTrainglemaskedSoftmaxBuilder
""",
}

# Section 1.11: the options of the commands.
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": (
        *("-H", "-host", "--host", "--hostfile", "--include", "--exclude", "--num_nodes", "--nproc_per_node"),
        *("--master_port", "--master_addr", "--extra_launch_args", "--ssh-port"),
    ),
    "check": ("-i", "--installation"),
    "benchmark": (
        *("-g", "--gpus", "-b", "--batch_size", "-s", "--seq_len", "-d", "--dimension", "-w"),
        *("--warmup_steps", "-p", "--profile_steps", "-l", "--layers", "-m", "--model"),
    ),
}
