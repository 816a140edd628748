from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config import HdpConfig
from megatron.bytescale.training.arguments import check_checkpoint_folder, ranks_of_a_node
from megatron.bytescale.training.refusals import REFUSALS
from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import preload, run_ranks

COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread"]
# A flag of ours or Megatron's, as a user would give it, for each row of REFUSALS.
EXAMPLES = {
    "--context-parallel-size > 1": "--context-parallel-size 2",
    "--microbatch-group-size-per-virtual-pipeline-stage": (
        "--microbatch-group-size-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 4"
    ),
    "--num-experts under tensor parallelism": "--num-experts 4 --tensor-model-parallel-size 2",
    "--moe-token-dispatcher-type allgather": (
        "--moe-token-dispatcher-type allgather --num-experts 4 --expert-model-parallel-size 2"
    ),
    "--moe-token-dispatcher-type flex": "--moe-token-dispatcher-type flex --num-experts 4",
    "--moe-router-load-balancing-type": "--moe-router-load-balancing-type aux_loss seq_aux_loss --num-experts 4",
    "--moe-expert-capacity-factor": "--moe-expert-capacity-factor 1.5 --num-experts 4",
    "--moe-latent-size": "--moe-latent-size 16",
    "--cuda-graph-impl": "--cuda-graph-impl local",
    "--num-distributed-optimizer-instances > 1": "--num-distributed-optimizer-instances 2",
    "--tensor-parallel-num-weight-shards": "--tensor-parallel-num-weight-shards 2",
    "--mtp-num-layers": "--mtp-num-layers 1",
    "--experimental-attention-variant": "--experimental-attention-variant dsa",
    "--hybrid-layer-pattern": "--hybrid-layer-pattern M*",
    "--hybrid-override-pattern": "--hybrid-override-pattern M*",
    "--heterogeneous-layers-config-path": "--heterogeneous-layers-config-path layers.json",
    "--heterogeneous-layers-config-encoded-json": "--heterogeneous-layers-config-encoded-json {}",
    "--spec": "--spec local",
    "--transformer-impl inference_optimized": "--transformer-impl inference_optimized",
    "--num-query-groups": "--num-query-groups 3 --group-query-attention",
    "--attention-backend": "--attention-backend flash",
    "--max-seqlen-per-dp-cp-rank": "--max-seqlen-per-dp-cp-rank 64",
    "--window-size": "--window-size 64,0",
    "--softmax-type": "--softmax-type learnable",
    "--attention-dropout > 0": "--attention-dropout 0.1",
    "--position-embedding-type": "--position-embedding-type yarn",
    "--fp8-format": "--fp8-format hybrid",
    "--fp4-format": "--fp4-format e2m1",
    "--te-precision-config-file": "--te-precision-config-file precision.yaml",
    "--cpu-offloading-num-layers": "--cpu-offloading-num-layers 1",
    "--rampup-batch-size": "--rampup-batch-size 4 4 100",
    "--step-batch-size-schedule": "--step-batch-size-schedule 0:8",
    "--iterations-to-skip": "--iterations-to-skip 3",
    "--phase-transition-iterations": "--phase-transition-iterations 3",
    "--per-dataset-sequences-path": "--per-dataset-sequences-path sequences.json",
    "--dataloader-type cyclic": "--dataloader-type cyclic",
    "--micro-batch-size > 1": "--micro-batch-size 2",
    "--eval-micro-batch-size > 1": "--eval-micro-batch-size 2",
    "--logits-save-dir": "--logits-save-dir logits",
    "--logits-load-dir": "--logits-load-dir logits",
}
SWITCHES = (
    "hybrid-context-parallel enable-cuda-graph external-cuda-graph optimizer-cuda-graph use-megatron-fsdp "
    "use-torch-fsdp2 tp-comm-overlap multi-latent-attention use-kitchen-attention apply-query-key-layer-scaling "
    "qk-clip log-max-attention-logit fine-grained-activation-offloading decrease-batch-size-if-needed "
    "full-validation multiple-validation-sets sft fim-data mock-data dataloader-fast-cache-load "
    "dataloader-defer-npy-index-mmap dataloader-inter-document-masking reset-position-ids reset-attention-mask "
    "eod-mask-loss apply-layernorm-1p "
    "overlap-moe-expert-parallel-comm moe-paged-stash moe-enable-routing-replay moe-use-upcycling "
    "no-align-param-gather defer-embedding-wgrad-compute overlap-param-gather-with-optimizer-step "
    "use-checkpoint-args inprocess-restart perform-rl-step vision-pretraining"
).split()
EXAMPLES.update({f"--{switch}": f"--{switch}" for switch in SWITCHES})


def settle(rank: int, world: int, lines: Sequence[tuple[int, list[str]]]) -> list[Any]:
    """Parse and settle each (number of processes, words): the config with some of Megatron's values, or the error."""
    return [settle_one(num_processes, words) for num_processes, words in lines]


def settle_one(num_processes: int, words: list[str]) -> Any:
    from megatron.training.arguments import parse_args

    from megatron.bytescale.training import arguments

    os.environ["WORLD_SIZE"] = str(num_processes)
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    try:
        args = parse_args(arguments.add_arguments)
        arguments.set_device_defaults(args, sys.argv, on_cpu=True)
        config = arguments.hdp_config(args)
        if config is not None:
            arguments.set_hdp_defaults(args)
        return config, {name: value for name, value in vars(args).items() if isinstance(value, bool | int | str)}
    except ValueError as error:
        return str(error)
    except SystemExit:
        return "argparse refuses it"


def settled(num_processes: int, *words: object) -> Any:
    preload("tests.e2e.preload")
    line = (num_processes, [str(word) for word in words])
    return run_ranks(settle, 1, [line], init_group=False)[0][0]


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """What is answered to the example of each row, in one process for all."""
    preload("tests.e2e.preload")
    lines = [(4, [*COMMON, *words.split()]) for words in EXAMPLES.values()]
    return dict(zip(EXAMPLES, run_ranks(settle, 1, lines, init_group=False)[0], strict=True))


def test_each_row_has_an_example() -> None:
    assert sorted(refusal.flag for refusal in REFUSALS) == sorted(EXAMPLES)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.flag)
def test_conflicting_flag_is_refused_by_name(row: Any, refused: dict[str, str]) -> None:
    assert refused[row.flag] == f"--hybrid-data-parallel does not work with {row.flag}: {row.instead}"
    assert row.flag.split()[0] == EXAMPLES[row.flag].split()[0]


def test_without_those_flags_the_line_is_accepted() -> None:
    config, values = settled(4, *COMMON, "--hdp-static-width", 4, "--hdp-log-dir", "logs", "--hdp-timeline-step", 3)
    assert config == HdpConfig(64, 1, 256, 4, static_width=4, log_dir=Path("logs"), timeline_step=3)
    assert values["calculate_per_token_loss"] is True
    assert values["dataloader_type"] == "external"
    assert values["micro_batch_size"] == values["eval_micro_batch_size"] == 1
    assert values["align_param_gather"] is True
    assert values["create_attention_mask_in_dataloader"] is False
    assert values["dist_ckpt_optim_fully_reshardable"] is True


def test_each_planner_flag_reaches_the_configuration() -> None:
    line = "--hdp-balance bytescale --hdp-cost cost.json --hdp-ranks-per-node 2 --hdp-plan-seconds 1.5"
    config, _ = settled(4, *COMMON, *line.split(), "--hdp-check-plans-every", 7, "--hdp-plan-ahead", 3)
    assert config == HdpConfig(
        64, 1, 256, 4, "bytescale", ranks_per_node=2, cost_file=Path("cost.json"), plan_ahead=3, plan_seconds=1.5,
        check_plans_every=7,
    )  # fmt: skip
    config, _ = settled(4, *COMMON, *"--seq1f1b-splits 3 --hdp-kept-keys 0".split())
    assert config.num_slices == 3 and config.kept_keys == 0


def test_balance_by_itself_is_that_of_free_ranks_or_of_pipelines() -> None:
    assert settled(4, *COMMON)[0].balance == "dp"
    config, _ = settled(8, *COMMON, "--pipeline-model-parallel-size", 2)
    assert (config.balance, config.num_ranks, config.num_stages, config.aligned) == ("pp", 4, 2, True)


def test_nodes_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for local, expected in (("2", 2), ("4", None), ("3", None), ("", None)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
        assert ranks_of_a_node(1, 4) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (ranks_of_a_node(2, 4), ranks_of_a_node(3, 4)) == (2, None)


def test_cpu_defaults_need_no_flag() -> None:
    _, values = settled(1, *MODEL, *TRAIN, "--data-path", "unread")
    assert values["transformer_impl"] == "local"
    assert values["distributed_backend"] == "gloo"
    assert values["use_cpu_initialization"] is True
    for name in ("apply_rope_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_swiglu_fusion",
                 "bias_gelu_fusion", "bias_dropout_fusion"):  # fmt: skip
        assert values[name] is False, name


def test_without_hybrid_data_parallelism_its_defaults_stay_megatrons() -> None:
    config, values = settled(1, *MODEL, *TRAIN, "--micro-batch-size", 2, "--data-path", "unread")
    assert config is None
    assert values["calculate_per_token_loss"] is False
    assert values["micro_batch_size"] == 2
    assert values.get("dataloader_type") is None


def test_transformer_engine_by_name_is_refused_on_cpu() -> None:
    message = settled(1, *MODEL, *TRAIN, "--transformer-impl", "transformer_engine")
    assert message.startswith("--transformer-impl transformer_engine: there is no GPU")
    assert "--transformer-impl local" in message


@pytest.mark.parametrize(
    "words",
    [
        "--hdp-tokens-per-rank 64",
        "--hdp-plan-ahead 2",
        "--hdp-static-width 2",
        "--hdp-log-dir logs",
        "--hdp-timeline-step 2",
        "--hdp-attention-kernel reference",
        "--hdp-balance none",
        "--hdp-cost cost.json",
        "--hdp-ranks-per-node 2",
        "--hdp-kept-keys 100",
        "--hdp-plan-seconds 1",
        "--hdp-check-plans-every 5",
    ],
)
def test_our_flags_need_the_main_one(words: str) -> None:
    assert settled(4, *MODEL, *TRAIN, *words.split()) == f"{words.split()[0]} needs --hybrid-data-parallel"


@pytest.mark.parametrize(
    "num_processes, words, expected",
    [
        (4, "--global-batch-size 6", "--global-batch-size 6 is not a multiple of the 4 data-parallel ranks|: 8"),
        (4, "--global-batch-size 0", "--global-batch-size 0 is not a multiple|: 4"),
        (4, "--eval-global-batch-size 6", "--eval-global-batch-size 6 is not a multiple of the 4|: 8"),
        (3, "--global-batch-size 9", "--seq-length 256|there are 3|--hdp-tokens-per-rank that fits is 86"),
        (4, "--hdp-tokens-per-rank 0", "--hdp-tokens-per-rank must be positive, got 0"),
        (4, "--hdp-tokens-per-rank 63", "--seq-length 256|there are 4|fits is 64"),
        (4, "--tensor-model-parallel-size 2", "there are 2|fits is 128"),
        (1, "--tensor-model-parallel-size 2", "1 processes|--tensor-model-parallel-size 2|start 2 processes"),
        (3, "--tensor-model-parallel-size 2", "3 processes|start 4 processes"),
        (
            8,
            "--tensor-model-parallel-size 2 --sequence-parallel --hdp-tokens-per-rank 65",
            "--hdp-tokens-per-rank 65|--tensor-model-parallel-size 2|--sequence-parallel|66",
        ),
        (4, "--hdp-plan-ahead 0", "--hdp-plan-ahead must be at least 1, got 0"),
        (4, "--hdp-plan-seconds 0", "--hdp-plan-seconds must be positive, got 0"),
        (4, "--hdp-check-plans-every 0", "--hdp-check-plans-every must be at least 1, got 0"),
        (4, "--hdp-ranks-per-node 0", "--hdp-ranks-per-node must be at least 1, got 0"),
        (8, "--hdp-balance dp --pipeline-model-parallel-size 2", "--hdp-balance dp lets ranks drift apart|use auto"),
        (6, "--pipeline-model-parallel-size 4", "6 processes|x --pipeline-model-parallel-size 4|start 8"),
        (4, "--hdp-static-width 3", "--hdp-static-width 3 does not divide the 4"),
        (4, "--hdp-timeline-step 3", "--hdp-timeline-step needs --hdp-log-dir"),
        (4, "--hdp-tokens-per-rank many", "argparse refuses it"),
    ],
)
def test_values_that_do_not_fit_are_refused(num_processes: int, words: str, expected: str) -> None:
    message = settled(num_processes, *COMMON, *words.split())
    assert isinstance(message, str), message
    assert "\n" not in message
    for part in expected.split("|"):
        assert part in message


def test_what_must_be_given() -> None:
    line = [*MODEL, *TRAIN, "--data-path", "unread", "--hybrid-data-parallel"]
    assert settled(4, *line) == "--hybrid-data-parallel needs --hdp-tokens-per-rank"
    line += ["--hdp-tokens-per-rank", "64"]
    without_length = [word for word in line if word not in ("--seq-length", "256", "--max-position-embeddings")]
    assert settled(4, *without_length) == "--hybrid-data-parallel needs --seq-length"
    at = line.index("--global-batch-size")
    assert settled(4, *line[:at], *line[at + 2 :]) == "--hybrid-data-parallel needs --global-batch-size"


def test_checkpoint_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_checkpoint_folder(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    check_checkpoint_folder(None)


def test_checkpoint_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--save .*file/checkpoints cannot be written \(.+\); choose another folder"):
        check_checkpoint_folder(str(tmp_path / "file" / "checkpoints"))
