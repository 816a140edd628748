"""Refusals of activation flags, before anything is built."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import num_parameters
from bytescale_ext.plan.setup.choose import remaining_text
from megatron.bytescale import features
from megatron.bytescale.arguments import parse as arguments
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.arguments.setup import optimizer_host_bytes

SHAPE = ModelShape(8, 1024, 8, 8, 128, 4096, True, 32000)
STATES_GB = 18 * num_parameters(SHAPE) / 1e9
"""Return the model states of the model of ``parsed`` on one process."""


def whole(activations_gb: float) -> str:
    """Return the device memory in GB, as text, that leaves ``activations_gb`` for activations."""
    return f"{STATES_GB + activations_gb:.9f}"


def parsed(*words: str, **settings: Any) -> argparse.Namespace:
    """Return parsed arguments of a small model, with our flags and other settings."""
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    args = parser.parse_args(words)
    megatron = {
        "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "group_query_attention": False,
        "num_query_groups": None, "kv_channels": 128, "ffn_hidden_size": 4096, "swiglu": True,
        "fake_process_group": False, "padded_vocab_size": 32000, "num_experts": None,
        "params_dtype": torch.bfloat16, "micro_batch_size": 1,
        "seq_length": 8192, "context_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "window_size": None, "window_attn_skip_freq": None,
        "gradient_accumulation_fusion": False,
        "recompute_granularity": None, "recompute_modules": None,
        "cuda_graph_impl": "none", "transformer_impl": "local", "world_size": 1, "rank": 0,
        "use_tp_pp_dp_mapping": False, "distributed_backend": "gloo", "distributed_timeout_minutes": 10,
        "log_interval": 1, "train_iters": 5, "save": None, "mtp_num_layers": None,
        "qk_l2_norm": False, "full_validation": False, "step_batch_size_schedule": None,
        "rampup_batch_size": None, "train_samples": None, "eval_global_batch_size": None,
        "fp16": False, "loss_scale": None, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0,
        "multiple_validation_sets": False, "ddp_average_in_collective": False, "optimizer": "adam",
        "result_rejected_tracker_filename": None, "init_model_with_meta_device": False,
        "normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False,
        "position_embedding_type": "rope", "max_position_embeddings": 8192, "bias_swiglu_fusion": True,
        "apply_rope_fusion": True, "rotary_percent": 1.0, "multi_latent_attention": False,
        "bias_gelu_fusion": True, "untie_embeddings_and_output_weights": True,
        "pipeline_model_parallel_layout": None, "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False, "data_parallel_size": 1, "global_batch_size": 64, "seed": 1234,
        "accumulate_allreduce_grads_in_fp32": True, "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": False, "use_precision_aware_optimizer": False,
        "weight_decay": 0.01, "recompute_method": None,
        "recompute_num_layers": None, "overlap_grad_reduce": False, "overlap_param_gather": False,
        "expert_tensor_parallel_size": None, "expert_model_parallel_size": 1, "moe_token_dispatcher_type": "allgather",
        "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    }  # fmt: skip
    for name, value in {**megatron, **settings}.items():
        vars(args)[name] = value
    return args


def config_of(*words: str, **settings: Any) -> ActivationConfig:
    args = parsed(*words, **settings)
    features.check(args)
    return resolve(args).get(ActivationConfig)


MEMO = ("--activation-policy", "memo", "--host-memory-gb", "2")


def test_policies_plan_with_what_was_given() -> None:
    config = config_of(*MEMO)
    plan = config.plan(config.largest)
    assert plan.policy == "memo"
    assert plan.input_swap == 1.0
    assert plan.resident_layers == 2
    assert forecast(plan, config.largest, config.machine).host_bytes <= 2e9
    fixed = config_of(*MEMO, "--swap-fraction", "0.25")
    assert fixed.plan(fixed.largest).swap == 0.25
    assert fixed.plan(fixed.largest).recompute == 0.75
    shares = config_of("--swap-fraction", "0.25", "--recompute-fraction", "0.5", "--host-memory-gb", "1")
    assert shares.plan(shares.largest).keep == pytest.approx(0.25)
    assert not shares.plan(shares.largest).rebuild_cheap


def test_a_slower_link_swaps_less() -> None:
    slow, usual = config_of(*MEMO, "--link-gb-per-second", "10"), config_of(*MEMO)
    assert slow.machine.link_bytes_per_second == 10e9
    assert usual.machine.link_bytes_per_second == 55e9
    assert slow.plan(slow.largest).swap < usual.plan(usual.largest).swap


def test_a_pipeline_counts_its_micro_batches_in_flight() -> None:
    load = config_of(*MEMO, pipeline_model_parallel_size=4, world_size=4).largest
    assert (load.num_layers, load.in_flight, load.resident_layers) == (2, 4, 0)
    for eager, in_flight in ((False, 4 + 8 - 1), (True, 4 + 8 - 1 + 3)):
        settings = {"pipeline_model_parallel_size": 4, "world_size": 4, "seq1f1b_slices": 8, "seq1f1b_eager": eager,
                    "hybrid_data_parallel": True, "hdp_tokens_per_rank": 8192, "hdp_kept_keys": 0}  # fmt: skip
        config = resolve(parsed(*MEMO, **settings)).get(ActivationConfig)
        assert config.largest.in_flight == in_flight


def test_measured_costs(tmp_path: Path) -> None:
    write_cost(tmp_path / "cost.json", cost_of_rates(SHAPE, 1e12, 1e12, 1e12))
    slow = config_of(*MEMO, "--cost-file", str(tmp_path / "cost.json"))
    assert slow.largest.forward_seconds > 100 * config_of(*MEMO).largest.forward_seconds
    with pytest.raises(ValueError, match="hidden"):
        config_of(*MEMO, "--cost-file", str(tmp_path / "cost.json"), hidden_size=512)


def test_assumed_speeds_are_printed_with_the_flags_that_replace_them(tmp_path: Path) -> None:
    plan, assumed = config_of(*MEMO).described().splitlines()
    assert plan.startswith("> bytescale: activations memo")
    assert assumed.startswith("> bytescale: assumed, not measured: 55 GB/s to host memory (give --link-gb-per-second; ")
    assert assumed.endswith(
        "layers as fast as in shipped h100, scaled (give --cost-file; `bytescale profile` measures them)"
    )
    parallel = config_of(*MEMO, tensor_model_parallel_size=2, world_size=2).assumed
    assert " and 300 GB/s between tensor-parallel ranks (give --cost-file" in parallel
    assert "GB/s" not in config_of("--recompute-fraction", "1").assumed  # nothing is swapped
    write_cost(tmp_path / "cost.json", cost_of_rates(SHAPE, 1e12, 1e12, 1e12))
    measured = config_of(*MEMO, "--cost-file", str(tmp_path / "cost.json"), "--link-gb-per-second", "20")
    assert measured.assumed == ""
    assert len(measured.described().splitlines()) == 1


def test_micro_batches_have_plans_of_their_own() -> None:
    from megatron.bytescale.features.activations.build import load_of_micro_batch

    config = config_of(*MEMO)
    loads = []
    for length, width in ((8192, 1), (65536, 8)):
        shard = SimpleNamespace(num_tokens=8192, ring=tuple(range(width)), shares=())
        packed = SimpleNamespace(micro_batch=SimpleNamespace(shards=(shard,), offload=0.0), num_rows=8192)
        loads.append(load_of_micro_batch(config, packed)[0])
        assert loads[-1].forward_seconds == pytest.approx(
            config.cost.forward.sequence_cost(length, width) + config.cost.forward.g
        )
    assert config.plan(loads[1]).swap > config.plan(loads[0]).swap  # the same tokens with more attention


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("--swap-fraction", "1.5", "--host-memory-gb", "1"), {}, "--swap-fraction 1.5 must be a share"),
        (("--swap-fraction", "0.7", "--recompute-fraction", "0.6", "--host-memory-gb", "1"), {}, "more than 1"),
        (("--activation-policy", "memo"), {}, "give --host-memory-gb"),
        (("--activation-policy", "memo", "--host-memory-gb", "1e6"), {}, "exceeds the free host memory"),
        (("--activation-policy", "memo", "--host-memory-gb", "0.001"), {}, r"need 0\.\d+ GB of host memory"),
        (
            ("--activation-policy", "offload", "--host-memory-gb", "0.1", "--device-memory-gb", whole(2.5)),
            {},
            r"take 1\.\d+ GB of host memory.* and --host-memory-gb is 0\.1",
        ),
        (
            (*MEMO, "--device-memory-gb", whole(0.5)),
            {},
            r"of model states take \d\.\d+ GB of device memory, and --device-memory-gb is 4\.\d+: give at least that",
        ),
        (
            (*MEMO, "--device-memory-gb", "1"),
            {},
            r"and 3\.\d+ GB of model states take \d\.\d+ GB of device memory, and --device-memory-gb is 1: give",
        ),
        (
            ("--activation-policy", "offload", "--host-memory-gb", "2.5", "--device-memory-gb", whole(0.5)),
            {},
            r"with 1 of the tokens swapped and 3\.\d+ GB of model states take \d\.\d+ GB of device memory",
        ),
        (("--activation-policy", "priced", "--host-memory-gb", "1"), {}, "needs --device-memory-gb"),
        (
            ("--activation-policy", "auto", "--host-memory-gb", "1", "--device-memory-gb", whole(0.1)),
            {},
            r"and 3\.\d+ GB of model states do not fit in 3\.\d+ GB of device memory and 1 GB of host memory: it takes",
        ),
        (
            ("--activation-policy", "auto", "--host-memory-gb", "1", "--device-memory-gb", "9", "--swap-fraction", "0"),
            {},
            "auto chooses the shares",
        ),
        (
            ("--activation-policy", "offload", "--host-memory-gb", "1", "--device-memory-gb", "9",
             "--recompute-fraction", "0.5"),
            {},
            "offload recomputes nothing",
        ),
        ((*MEMO, "--link-gb-per-second", "0"), {}, "must be positive"),
        (MEMO, {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]}, "--recompute-granularity"),
        (MEMO, {"recompute_activations": True}, "--recompute-granularity"),
    ],
)  # fmt: skip
def test_refusals(words: tuple[str, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*words, **settings)


def test_the_host_budget_that_is_named_works() -> None:
    """The message of each policy names the smallest budget: one percent less is refused again."""
    cases = {
        ("--activation-policy", "memo"): r"need ([\d.]+) GB",
        ("--activation-policy", "offload", "--device-memory-gb", whole(2.5)): r"take ([\d.]+) GB of host",
        ("--activation-policy", "priced", "--device-memory-gb", whole(2.25)): r"fits with ([\d.]+) GB",
        ("--activation-policy", "auto", "--device-memory-gb", whole(2.25)): r"fits with ([\d.]+) GB",
        ("--swap-fraction", "0.5"): r"take ([\d.]+) GB of host",
    }
    for words, pattern in cases.items():
        with pytest.raises(ValueError, match=pattern) as error:
            config_of(*words, "--host-memory-gb", "0.01")
        named = float(re.findall(pattern, str(error.value))[0])
        config_of(*words, "--host-memory-gb", str(named))
        with pytest.raises(ValueError, match=r"host memory"):
            config_of(*words, "--host-memory-gb", str(0.99 * named))


def test_a_dry_run_is_of_another_machine() -> None:
    words = ("--activation-policy", "memo", "--host-memory-gb", "1e6")
    assert config_of(*words, fake_process_group=True).machine.host_bytes == 1e15


def test_an_optimizer_in_host_memory_is_counted_in() -> None:
    free = free_host_bytes() / 1e9
    offloads = {
        "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "use_distributed_optimizer": True,
        "data_parallel_size": 2, "pipeline_model_parallel_size": 1, "distributed_backend": "nccl",
    }  # fmt: skip
    taken = optimizer_host_bytes(parsed(**offloads), SHAPE)
    assert taken == 16 * num_parameters(SHAPE) * 0.5 / 2
    with pytest.raises(ValueError, match=r"after 0\.\d+ GB for the optimizer \(--optimizer-cpu-offload\)"):
        config_of("--activation-policy", "memo", "--host-memory-gb", f"{free - taken / 2e9}", **offloads)


def test_operators_of_several_parts_save_more() -> None:
    """On CPU torch's RMSNorm keeps the normalized input, and unfused SwiGLU keeps two inputs of a product."""
    fused = config_of(*MEMO).largest
    split = config_of(*MEMO, normalization="RMSNorm", bias_swiglu_fusion=False).largest
    of_norms = 2 * (1024 * (4 + 2) + 4)
    assert split.bytes_of() - fused.bytes_of() == 8192 * (of_norms + 2 * 2 * 4096)
    assert split.bytes_of("view") == 8192 * 2 * 4096
    assert split.bytes_of("input") == fused.bytes_of("input")


def test_each_stage_plans_for_its_own_layers_and_micro_batches() -> None:
    """With 7 + 1 layers, the first stage has two micro-batches in flight and the last stage keeps its layer whole."""
    sizes = {"pipeline_model_parallel_size": 2, "world_size": 2, "decoder_first_pipeline_num_layers": 7}
    first, last = (config_of(*MEMO, rank=rank, **sizes).layers for rank in (0, 1))
    assert (first.num_layers, first.in_flight, first.resident_layers) == (7, 2, 0)
    assert (last.num_layers, last.in_flight, last.resident_layers) == (1, 1, 2)
    few = config_of(*MEMO, global_batch_size=1, **sizes).layers
    assert few.in_flight == 1
    virtual = {"pipeline_model_parallel_size": 2, "world_size": 2, "virtual_pipeline_model_parallel_size": 2}
    # (2 (p - s - 1) + (v - 1) p + 1) / v chunks of the layers
    assert [config_of(*MEMO, rank=rank, **virtual).layers.in_flight for rank in (0, 1)] == [3, 2]


def _resolved(*words: str, **settings: Any) -> ActivationConfig:
    return resolve(parsed(*words, **settings)).get(ActivationConfig)


def test_slices_count_their_keys_and_the_sums_of_their_gradients() -> None:
    """Two stages run two equal slices. By hand, in tokens, the peak of the first stage is the second backward pass."""
    sizes = {"pipeline_model_parallel_size": 2, "world_size": 2, "seq1f1b_slices": 2, "seq1f1b_partition": "even",
             "eval_iters": 0}  # fmt: skip
    keep = ("--swap-fraction", "0", "--recompute-fraction", "0.5")
    config = _resolved(*keep, **sizes)
    key = 2 * 8 * 128 * 2
    held = [round(one.bytes / key / 4096) for one in config.layers.slices]
    # B0.1: keys of 3 slices and a float32 sum of one slice; B0.0: keys of 3 slices, and that sum until its end
    assert max(held) == 3 + 2
    assert max(one.tokens for one in config.layers.slices) == 3 * 4096
    load = config.largest
    assert (load.num_tokens, load.times_held) == (4096, 3)
    plan = config.plan(load)
    with_keys = forecast(plan, load, config.machine).device_bytes
    without = forecast(plan, replace(load, slices=()), config.machine).device_bytes
    assert with_keys - without == pytest.approx(4 * 5 * 4096 * key, rel=0.03)  # and copies of keys in attention
    stages = [_resolved(*keep, rank=rank, **sizes) for rank in (0, 1)]
    needed = max(forecast(plan, one.largest, one.machine).device_bytes + one.machine.state_bytes for one in stages)
    assert _resolved(*keep, "--device-memory-gb", f"{needed / 1e9 + 1e-6}", **sizes).layers == config.layers
    with pytest.raises(ValueError, match="of device memory, and --device-memory-gb is"):
        _resolved(*keep, "--device-memory-gb", f"{0.99 * needed / 1e9}", **sizes)


def test_slices_of_documents_count_the_keys_that_they_keep() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "world_size": 8, "data_parallel_size": 4, "seq1f1b_slices": 2,
             "hybrid_data_parallel": True, "hdp_tokens_per_rank": 4096, "seq_length": 16384}  # fmt: skip
    none, some = (
        _resolved("--recompute-fraction", "1", hdp_kept_keys=kept, **sizes).layers.slices for kept in (0, 16384)
    )
    assert max(one.bytes for one in some) == pytest.approx(4 * max(one.bytes for one in none), rel=0.1)


def test_a_run_is_told_what_model_states_leave_to_activations() -> None:
    run = resolve(parsed(*MEMO, "--device-memory-gb", whole(3)))
    assert remaining_text(run.decision) == (
        f"> bytescale: device memory {STATES_GB + 3:.4g} GB: model states {STATES_GB:.4g} GB, which leaves 3 GB for "
        "activations and keys"
    )
    assert remaining_text(resolve(parsed(*MEMO)).decision) == ""


def test_the_device_budget_that_is_named_is_that_of_the_whole_device() -> None:
    words = ("--activation-policy", "auto", "--host-memory-gb", "2", "--device-memory-gb")
    with pytest.raises(ValueError, match=r"it takes ([\d.]+) GB of device memory") as error:
        config_of(*words, whole(0.01))
    named = float(re.findall(r"it takes ([\d.]+) GB", str(error.value))[0])
    assert named > STATES_GB
    config_of(*words, str(named), "--host-memory-gb", "100", fake_process_group=True)


def test_a_stage_that_does_not_fit_is_refused_on_all_stages() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "world_size": 2, "decoder_first_pipeline_num_layers": 7}
    words = ("--swap-fraction", "1", "--host-memory-gb", "0.5")
    for rank in (0, 1):
        with pytest.raises(ValueError, match=r"GB of host memory, and --host-memory-gb is 0\.5"):
            config_of(*words, rank=rank, **sizes)
