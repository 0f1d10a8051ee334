"""LoRA models of PEFT that are cut: loss, gradients of the adapters and training are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchFSDPPlugin
from colossalai.checkpoint_io import load_pretrained
from colossalai.core import global_context as gpc
from colossalai.mesh import placement, serial_tensor
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")
peft = pytest.importorskip("peft", reason="needs `pip install peft`")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
CAUSAL = {"task_type": "CAUSAL_LM"}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": LLAMA, **CAUSAL}),
    "few keys": ("few keys", {"target_modules": "all-linear"}),
    "table and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"], **CAUSAL}),
    "copies": (
        "llama",
        {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens", "mlp"]},
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "bias": "lora_only", **CAUSAL}),
    "bert": ("bert", {"target_modules": ["query", "value", "dense"], "task_type": "SEQ_CLS"}),
    "derived": ("gptj", {"target_modules": ["q_proj", "v_proj", "out_proj", "fc_in", "fc_out"], **CAUSAL}),
    "fused keys": ("falcon", {"target_modules": ["query_key_value", "dense_4h_to_h"], **CAUSAL}),
}


def base(kind: str) -> Any:
    torch.manual_seed(0)
    hf = transformers
    no_drop = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    narrow = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, **no_drop}
    if kind in ("llama", "few keys"):
        keys = 2 if kind == "few keys" else 4
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=13, num_key_value_heads=keys, **SIZES)).double()
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=0, eos_token_id=0, **narrow)).double()
    if kind == "gptj":
        return hf.GPTJForCausalLM(hf.GPTJConfig(rotary_dim=4, **narrow)).double()
    if kind == "falcon":
        sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        return hf.FalconForCausalLM(hf.FalconConfig(vocab_size=13, **sizes)).double()
    rates = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = hf.BertConfig(vocab_size=13, max_position_embeddings=16, num_labels=3, **SIZES, **rates)
    return hf.BertForSequenceClassification(config).double()


def build(case: str, dropout: float = 0.0) -> Any:
    kind, options = CASES[case]
    model = base(kind)
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout, **options)
    model = peft.get_peft_model(model, config).double().train()
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:  # B is zero by default, so that nothing of A would be trained in the first step
            nn.init.normal_(p, std=0.1)
    return model


def batch(case: str) -> dict[str, Tensor]:
    ids = torch.arange(32).view(4, 8) ** 2 % 13
    return {"input_ids": ids, "labels": torch.tensor([0, 1, 2, 0]) if case == "bert" else ids}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def train(model: nn.Module, case: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the gradients of the first."""
    optimizer, losses, first = optimizer_of(model), [], {}
    for _ in range(2):
        loss = model(**batch(case)).loss
        optimizer.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        first = first or grads
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


def launch(**parallel: Any) -> None:
    if gpc.is_initialized(colossalai.context.ParallelMode.GLOBAL):
        gpc.destroy()
    colossalai.launch_from_torch({"parallel": parallel, "NUM_MICRO_BATCHES": 2}, verbose=False)


def stored(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for name, value in found.items():
        off = float((value.double() - wanted[name].double()).abs().max())
        assert off < tolerance, f"{name}: {off}"


def check_cut(rank: int, world_size: int, port: int, folder: Path, cases: list[str]) -> None:
    launch(tensor={"size": world_size, "mode": "1d"})
    for case in cases:
        serial = build(case)
        model = parallelize(build(case))
        mesh = model.cut_as[1]
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        losses, grads = train(serial, case)
        own_losses, own_grads = train(model, case)
        assert own_losses == pytest.approx(losses, abs=1e-6), case  # computed in float32 by some models
        named = dict(model.named_parameters())
        assert own_grads.keys() == grads.keys(), "only what is trained has gradients"
        near({n: serial_tensor(g, named[n], mesh) for n, g in own_grads.items()}, grads)
        near({n: serial_tensor(p.detach(), p, mesh) for n, p in named.items()}, serial.state_dict())
        assert all(torch.equal(named[n], p) for n, p in frozen.items()), "the base keeps its bits"
        check_files(model, serial, case, folder / case)
        check_dropout(case)


def check_files(model: Any, serial: Any, case: str, folder: Path) -> None:
    """Adapters are opened on one device and under a plan, and merged, as those of one device are."""
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(base(CASES[case][0]), folder).double()
    state = peft.get_peft_model_state_dict(again, save_embedding_layers=False)
    assert all(torch.equal(value, state[name]) for name, value in stored(folder).items())
    near(state, peft.get_peft_model_state_dict(serial, save_embedding_layers=False))
    fresh = build(case)
    for p in fresh.parameters():
        p.data.mul_(0 if p.requires_grad else 1)
    fresh = load_pretrained(parallelize(fresh), folder)
    mine = dict(model.named_parameters())
    assert all(torch.equal(p, mine[n]) for n, p in fresh.named_parameters() if p.requires_grad)
    merged, wanted = model.merge_and_unload(), serial.merge_and_unload()
    with torch.no_grad():
        inputs = batch(case)
        near({"logits": merged.eval()(**inputs).logits}, {"logits": wanted.eval()(**inputs).logits})


def check_dropout(case: str) -> None:
    """What all ranks hold stays alike, though each drops for its own features where they are cut."""
    model = parallelize(build(case, dropout=0.3))
    torch.manual_seed(7)
    train(model, case)
    own = [p.detach() for p in model.parameters() if p.requires_grad and not placement(p).sharded]
    for p in own:
        first = p.clone()
        dist.broadcast(first, 0)
        torch.testing.assert_close(p, first, rtol=0, atol=1e-12)


def test_two_ranks_train_the_adapters_of_one_device(tmp_path: Path) -> None:
    spawn(
        check_cut, 2, folder=tmp_path, cases=["llama", "table and head", "copies", "gpt2", "bert", "derived"]
    )


def test_four_ranks_share_two_heads_of_keys(tmp_path: Path) -> None:
    spawn(check_cut, 4, folder=tmp_path, cases=["few keys", "fused keys", "gpt2"])


def plugin(name: str) -> Plugin | None:
    chunk = 64 * 4 / 1024**2
    if name == "zero-2":
        return LowLevelZeroPlugin(2, "fp32")
    if name == "fsdp":
        return TorchFSDPPlugin()
    if name == "gemini":
        sizes = {"min_chunk_size_mb": chunk, "search_range_mb": chunk}
        return GeminiPlugin(device="cpu", precision="fp32", placement_policy="cpu", **sizes)
    return None


def check_plans(rank: int, world_size: int, port: int, folder: Path, plans: list[tuple[Any, ...]]) -> None:
    for case, name, tensor, pipeline in plans:
        launch(tensor={"size": tensor, "mode": "1d"}, pipeline=pipeline)
        serial = build(case)
        train(serial, case)
        frozen = {n: p for n, p in build(case).named_parameters() if not p.requires_grad}
        inner = build(case).float() if name == "gemini" else build(case)
        inner = split_model(inner) if pipeline > 1 else parallelize(inner)
        booster = Booster(device=None if name == "gemini" else "cpu", plugin=plugin(name))
        model, optimizer, *_ = booster.boost(inner, optimizer_of(inner))
        parts = world_size // tensor // pipeline
        place = gpc.get_local_rank(colossalai.context.ParallelMode.DATA)
        own = {key: value.chunk(parts)[place] for key, value in batch(case).items()}
        for _ in range(2):
            optimizer.zero_grad()
            if pipeline > 1:
                booster.execute_pipeline(iter([own]), model, None, optimizer)
            else:
                booster.backward(model(**own).loss, optimizer)
            optimizer.step()
        where = folder / f"{case} {name} {tensor} {pipeline}"
        colossalai.save_pretrained(model, where)
        booster.save_model(model, where / "whole.bin")
        wanted = peft.get_peft_model_state_dict(serial)
        assert stored(where).keys() == wanted.keys()
        near(stored(where), wanted, 1e-5 if name == "gemini" else 1e-9)
        whole = torch.load(where / "whole.bin", weights_only=True)
        assert all(torch.equal(whole[n], p.to(whole[n].dtype)) for n, p in frozen.items())
        if pipeline > 1 and tensor == 1 and name == "none":
            check_stage_adapters(inner, case, where, rank)
        dist.barrier()


def check_stage_adapters(stage: Any, case: str, folder: Path, rank: int) -> None:
    again = split_model(build(case))
    load_pretrained(again, folder)
    mine = dict(stage.named_parameters())
    assert all(torch.equal(p, mine[n]) for n, p in again.named_parameters())
    with pytest.raises(RuntimeError, match=r"merge_and_unload: this PeftModel\w* is stage \d of 2; call"):
        stage.merge_and_unload()
    with pytest.raises(RuntimeError, match="new adapters would not be; add and load adapters before"):
        stage.load_adapter(folder, "other")
    late = peft.get_peft_model(split_model(base(CASES[case][0])), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"alone; call peft.get_peft_model before split_model"):
        Booster(device="cpu").boost(late)
    with pytest.raises(ValueError, match=r"alone; call peft.get_peft_model before split_model"):
        colossalai.save_pretrained(late, folder)


def test_stages_write_the_adapters_of_all(tmp_path: Path) -> None:
    plans = [("llama", "none", 1, 2), ("copies", "none", 1, 2), ("bert", "zero-2", 1, 2)]
    spawn(check_plans, 2, folder=tmp_path, plans=[*plans, ("derived", "gemini", 1, 2)])


def test_tensor_parallel_adapters_under_plugins(tmp_path: Path) -> None:
    plans = [("gpt2", "zero-2", 2, 1), ("bert", "gemini", 2, 1), ("llama", "none", 2, 2)]
    plans.append(("copies", "fsdp", 2, 1))
    spawn(check_plans, 4, folder=tmp_path, plans=plans)


def check_refusals(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(tensor={"size": 2, "mode": "1d"})

    def refused(config: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            parallelize(peft.get_peft_model(base("llama"), config))

    refused(peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "adapters of DoraLinearVariant")
    refused(peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "has a peft.tuners.ia3.layer")
    refused(peft.AdaLoraConfig(total_step=9, target_modules=["q_proj"]), "has a peft.tuners.adalora.layer")
    refused(peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL), "has learned prompts of PEFT")
    tokens = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1])
    refused(tokens, r"'model.embed_tokens' of LlamaForCausalLM is in a TrainableTokensWrapper")
    with pytest.raises(ValueError, match=r"role=expand.* is not supported"):
        peft.get_peft_model(parallelize(base("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    model = parallelize(build("llama"))
    with pytest.raises(RuntimeError, match="new adapters would not be"):
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="holds adapters of PEFT, and this LlamaForCausalLM has none"):
        load_pretrained(parallelize(base("llama")), folder)
    with pytest.raises(RuntimeError, match=r"it lacks .*lm_head.lora_A"):
        load_pretrained(parallelize(build("table and head")), folder)


def test_what_is_not_plain_lora_is_refused(tmp_path: Path) -> None:
    spawn(check_refusals, 2, folder=tmp_path)


def check_2d(rank: int, world_size: int, port: int) -> None:
    launch(tensor={"size": 4, "mode": "2d"})
    with pytest.raises(ValueError, match="which mode '1d' and pipelines know, but not mode '2d'"):
        parallelize(build("llama"))


def test_adapters_are_refused_where_the_stream_is_cut() -> None:
    spawn(check_2d, 4)


def check_habits(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Checkpointed activations, several adapters, generation, and adapters without a PeftModel."""
    launch(tensor={"size": 2, "mode": "1d"})

    def checkpointed() -> Any:
        inner = base("llama")
        inner.gradient_checkpointing_enable()  # PEFT then puts a hook on the table
        return peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"], **CAUSAL)).double()

    def injected() -> Any:
        inner = base("llama")
        inner.add_adapter(peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
        return inner.double()

    for make in (checkpointed, injected):
        torch.manual_seed(3)
        serial = make()
        torch.manual_seed(3)
        model = parallelize(make())
        assert train(model, "llama")[0] == pytest.approx(train(serial, "llama")[0], abs=1e-6)
        model.save_pretrained(folder / make.__name__)
        if rank == 0:
            serial.save_pretrained(folder / "serial")
            near(stored(folder / make.__name__), stored(folder / "serial"))
        dist.barrier()

    serial, model = build("llama"), parallelize(build("llama"), whole_scores=False)
    for each in (serial.eval(), model.eval()):
        each.generation_config.pad_token_id = 0
    tokens = [
        each.generate(input_ids=batch("llama")["input_ids"], max_new_tokens=4) for each in (serial, model)
    ]
    assert torch.equal(*tokens)
    with torch.no_grad(), serial.disable_adapter(), model.disable_adapter():
        near({"logits": model(**batch("llama")).loss}, {"logits": serial(**batch("llama")).loss}, 1e-6)


def test_habits_of_scripts_with_adapters(tmp_path: Path) -> None:
    spawn(check_habits, 2, folder=tmp_path)
