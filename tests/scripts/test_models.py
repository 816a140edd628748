"""Recipes of models pass Megatron's parser and our checks, plan a step and have the model's parameters."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.bytescale.arguments.resolving import checked
from tests.e2e.corpora import VOCAB, documents
from tests.e2e.docs.pages import with_values
from tests.e2e.training import Outcome, train
from tests.harness import run_ranks
from tests.sample import is_whole, sampled
from tests.scripts.launchers import ROOT

pytestmark = pytest.mark.ranks

DRY_RUN = {"fake_process_group": True}  # the memory of this machine does not matter

MODELS = ROOT / "scripts" / "recipes" / "models"
RECIPES = sorted(MODELS.glob("*/*.sh"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECIPES]
SURVEYED = ["bytescale/7b", "memo/7b", "open/deepseek-v2-lite", "open/gpt-oss-20b", "seq1f1b/2.7b"]
"""Recipes whose plan and model `make test` checks, one of each kind; `make test-all` checks all."""
# Parameters of the published model cards, which the shapes must have exactly.
PUBLISHED = {
    "open/llama-3.1-8b": 8_030_261_248,
    "open/llama-3.1-70b": 70_553_706_496,
    "open/qwen3-30b-a3b": 30_532_122_624,
    "open/gpt-oss-20b": 20_914_757_184,
    "open/deepseek-v2-lite": 15_706_484_224,
    "open/deepseek-v3-shape": 671_026_404_352,
    "open/qwen3-235b-a22b-shape": 235_093_634_560,
    "open/mistral-7b": 7_241_732_096,
    "bytescale/141b": 140_620_634_112,
}


@dataclass(frozen=True)
class Surveyed:
    """Survey of a recipe: parameters of built shapes and of the forecast, the plan of a step, and types of buffers."""

    parameters: int
    buffers: dict[str, str]
    forecast: float
    num_ranks: int
    widest: int


def shown(path: Path, action: str, **values: str) -> str:
    """Return the output of a recipe."""
    done = subprocess.run([path, action], capture_output=True, text=True, timeout=60, env={**os.environ, **values})
    assert done.returncode == 0, done.stderr
    return done.stdout


def value(path: Path, name: str) -> str:
    """Return a value that a recipe sets."""
    assignment = re.search(rf"\b{name}=(\S+)", path.read_text())
    assert assignment is not None, name
    return assignment[1]


def survey(rank: int, world: int, recipes: Sequence[tuple[int, int, str, list[str]]]) -> list[Surveyed | str]:
    """Return the survey of each (processes, vocabulary, sampler, flags), or the error of a refused recipe."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return [survey_one(*recipe) for recipe in recipes]


def survey_one(processes: int, vocab: int, sampler: str, words: list[str]) -> Surveyed | str:
    from bytescale_ext.config.hdp import HdpConfig
    from bytescale_ext.plan.evaluate.length_samplers import sample_documents
    from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters
    from bytescale_ext.plan.setup.planner import planner_of
    from bytescale_ext.plan.step.check import check_step_plan
    from megatron.bytescale.arguments.resolve import resolve

    try:
        args = checked(processes, words, vocab, **DRY_RUN)
        run = resolve(args)
        lengths = [args.seq_length] * args.global_batch_size
        if sampler != "equal":
            lengths[1:] = sample_documents(sampler, args.seq_length, args.global_batch_size - 1, seed=1)
        hdp, plan = run.get(HdpConfig), planner_of(run.decision)(lengths)
        check_step_plan(plan, lengths, hdp.rows_multiple, run.decision.offloading_layers, hdp.cluster.ranks_per_node)
    except (ValueError, SystemExit) as error:
        return str(error)
    trunk = replace(run.shape, later_layers=0)  # built models have no layers of multi-token prediction
    alone = [word for word in words if not word.startswith("--overlap")]
    for flag in OF_PIPELINES & set(words):
        del alone[alone.index(flag) : alone.index(flag) + 2]
    first = args.moe_layer_freq.count(0) if isinstance(args.moe_layer_freq, list) else 0  # layers without experts
    freq = ["--moe-layer-freq", "([0]+[1])*1"] if first else []
    two = built_parameters([*alone, *ONE_RANK, "--num-layers", "2", *freq], vocab)

    def each(*layers: str) -> int:
        return built_parameters([*alone, *ONE_RANK, "--num-layers", *layers], vocab) - two

    if first:
        dense, sparse = (each("3", "--moe-layer-freq", layers) for layers in ("[0]*2+[1]", "[0]+[1]*2"))
        others = dense * (first - 1) + sparse * (run.shape.num_layers - first - 1)
    else:
        others = -each("1") * (run.shape.num_layers - 2)
    return Surveyed(
        parameters=two + others,
        buffers=built_buffers([*alone, *ONE_RANK, "--num-layers", "2", *freq], vocab),
        forecast=num_parameters(trunk) + expert_parameters(trunk),
        num_ranks=plan.num_ranks,
        widest=max(len(shard.ring) for batches in plan.ranks for batch in batches for shard in batch.shards),
    )


OF_PIPELINES = {"--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"}
ONE_RANK = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1 "
    "--expert-tensor-parallel-size 1 --hdp-tokens-per-rank 2097152 --seq1f1b-slices 1"
).split()


def built_parameters(words: list[str], vocab: int) -> int:
    """Return the parameters of the model that Megatron builds, on a device without memory."""
    return sum(parameter.numel() for parameter in built_model(words, vocab).parameters())


def built_buffers(words: list[str], vocab: int) -> dict[str, str]:
    """Return the type of each buffer of Megatron's wrapped model, by "Class.buffer". Experts have a bias."""
    from megatron.core.transformer.module import Float16Module

    from megatron.bytescale.training.buffer_types import BufferTypes, buffers_of

    bias = ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
    model, types = built_model([*words, *bias] if "--num-experts" in words else words, vocab), BufferTypes()
    types.note([model])
    wrapped = Float16Module(model.config, model)
    return {name: str(kind).removeprefix("torch.") for name, kind in buffers_of(types.restore([wrapped])).items()}


def built_model(words: list[str], vocab: int) -> Any:
    """Return the model that Megatron builds, on a device without memory."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron.bytescale.core.models.gpt.gpt_layer_specs import _set_document_modules
    from megatron.bytescale.core.transformer.spec_utils import layers_of
    from tests.bytescale.runtimes import runtime_of

    args: Any = checked(1, words, vocab, **DRY_RUN)
    config = gpt_config_from_args(args).transformer
    config.perform_initialization = False
    spec, tied = get_gpt_decoder_block_spec(config, False), not args.untie_embeddings_and_output_weights
    for layer in layers_of(spec):
        _set_document_modules(layer.submodules, runtime_of(), has_engine=False)
    with torch.device("meta"):
        return GPTModel(
            config,
            spec,
            vocab,
            args.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )


@pytest.fixture(scope="module")
def corpus() -> Path:
    return documents()


@pytest.fixture(scope="module")
def surveys() -> dict[str, Surveyed | str]:
    rows, names = [], NAMES if is_whole() else SURVEYED
    for path in (RECIPES[NAMES.index(name)] for name in names):
        processes = int(value(path, "NODES")) * int(value(path, "GPUS_PER_NODE"))
        words = [*shown(path, "flags").splitlines(), "--cpu"]
        rows.append((processes, int(value(path, "VOCAB")), value(path, "SAMPLER"), words))
    answers: list[Surveyed | str] = run_ranks(survey, 1, rows, timeout=900)[0]
    return dict(zip(names, answers, strict=True))


@pytest.mark.parametrize("name", sampled(NAMES, SURVEYED))
def test_a_recipe_plans_and_has_its_parameters(name: str, surveys: dict[str, Surveyed | str]) -> None:
    path, recipe = RECIPES[NAMES.index(name)], surveys[name]
    assert isinstance(recipe, Surveyed), recipe
    assert recipe.parameters == PUBLISHED.get(name, int(value(path, "PARAMETERS"))) == int(value(path, "PARAMETERS"))
    assert recipe.widest <= recipe.num_ranks
    words = shown(path, "flags").split()
    tokens, longest = int(value(path, "TOKENS_PER_RANK")), int(value(path, "SEQ_LENGTH"))
    assert recipe.widest >= -(-longest // tokens), "the longest document needs more ranks"
    tied = 0 if "--untie-embeddings-and-output-weights" in words else int(words[words.index("--hidden-size") + 1])
    forecast = recipe.forecast - tied * int(value(path, "VOCAB"))  # it counts both matrices, as on two stages
    is_plain = "--disable-bias-linear" in words and not {"--qk-layernorm", "--add-qkv-bias"} & set(words)
    assert forecast == recipe.parameters if is_plain else forecast == pytest.approx(recipe.parameters, rel=1e-3)


# (type, sum that it holds) of each buffer of a recipe's model in bf16, with an expert bias
BUFFERS = {
    "DocumentAttention.softmax_offset": ("bfloat16", "nothing: a constant"),
    "SampleRouter.local_tokens_per_expert": ("float32", "tokens of each expert, of all micro-batches of a step"),
    "SampleRouter.expert_bias": ("float32", "the update of each step"),
    "SampleRouter.global_tokens_per_expert": ("float32", "nothing: int64 counts of our own take its place"),
    "SampleRouter.ga_steps": ("float32", "nothing: the same"),
    "YarnRotaryEmbedding.cos_cached": ("float32", "nothing: cosines"),
    "YarnRotaryEmbedding.sin_cached": ("float32", "nothing: sines"),
}


@pytest.mark.parametrize("name", sampled(NAMES, SURVEYED))
def test_buffers_that_hold_sums_are_not_in_half_precision(name: str, surveys: dict[str, Surveyed | str]) -> None:
    recipe, has_experts = surveys[name], "--num-experts" in shown(RECIPES[NAMES.index(name)], "flags").split()
    assert isinstance(recipe, Surveyed), recipe
    assert recipe.buffers == {buffer: BUFFERS[buffer][0] for buffer in recipe.buffers}
    assert ("SampleRouter.local_tokens_per_expert" in recipe.buffers) == has_experts


def test_the_lines_for_torchrun_and_slurm(tmp_path: Path) -> None:
    path = MODELS / "open" / "mistral-7b.sh"
    torchrun, empty, slurm = shown(path, "print", DATA="data/mine").splitlines()
    flags = shown(path, "flags", DATA="data/mine").splitlines()
    assert empty == ""
    words = shlex.split(torchrun)
    entry = next(index for index, word in enumerate(words) if word.endswith("pretrain_gpt_hdp.py"))
    assert words[entry + 1 :][: len(flags)] == flags
    assert "--nnodes=1 --nproc-per-node=8" in torchrun
    assert any(word.startswith("MODEL_FLAGS=--num-layers 32 --hidden-size 4096") for word in shlex.split(slurm))
    assert " sbatch --nodes=1 --gpus-per-node=8 " in slurm
    (tmp_path / "sbatch").write_text('#!/bin/bash\necho "$MODEL_FLAGS|$TOKENS_PER_RANK|$*"\n')
    (tmp_path / "sbatch").chmod(0o755)
    printed = shown(path, "slurm", PATH=f"{tmp_path}:{os.environ['PATH']}")
    given, tokens, words = printed.split("|")
    assert given.split() == flags[: len(given.split())]
    assert tokens == "8192"
    assert words.split()[:2] == ["--nodes=1", "--gpus-per-node=8"]
    assert words.split()[-2:] == ["--chunked-cross-entropy", "2048"]
    done = subprocess.run([path, "odd"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_printed_lines_quote_what_users_gave(tmp_path: Path) -> None:
    """Pasted into a shell, a printed line runs no command of a name."""
    given = {"DATA": "$(touch${IFS}ran)", "OUT": "a'b;touch ran`touch ran`", "TOKENIZER": "--x '&touch ran"}
    torchrun, _, slurm = shown(MODELS / "open" / "mistral-7b.sh", "print", **given).splitlines()
    echo = f"printf '%s\\n' {torchrun}\nenv {slurm.replace(' sbatch ', ' true ')}"
    done = subprocess.run(["bash", "-c", echo], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert given["DATA"] in done.stdout.splitlines()
    assert f"{given['OUT']}/checkpoints" in done.stdout.splitlines()
    assert not (tmp_path / "ran").exists()


# A twin keeps the flags of its recipe and its kinds of parallelism, with 2 ranks each and these sizes.
SIZES = {
    "--num-layers": "2", "--hidden-size": "32", "--ffn-hidden-size": "48", "--num-attention-heads": "4",
    "--num-query-groups": "2", "--kv-channels": "8", "--kv-lora-rank": "16", "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "4", "--v-head-dim": "6", "--q-lora-rank": "12", "--moe-router-num-groups": "2",
    "--moe-router-group-topk": "1", "--decoder-first-pipeline-num-layers": "1",
    "--decoder-last-pipeline-num-layers": "1", "--num-experts": "4", "--moe-router-topk": "2",
    "--moe-layer-freq": "[0,1]", "--moe-ffn-hidden-size": "16", "--moe-shared-expert-intermediate-size": "16",
    "--window-size": "24,0", "--window-attn-skip-freq": "2", "--seq-length": "256", "--max-position-embeddings": "256",
    "--hdp-tokens-per-rank": "256", "--global-batch-size": "4", "--hdp-global-tokens": "1024",
    "--chunked-cross-entropy": "64", "--host-memory-gb": "0.1", "--vocab-size": str(VOCAB), "--split": "100,0,0",
    "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2", "--expert-model-parallel-size": "2",
    "--lr": "1e-2", "--min-lr": "1e-3", "--train-iters": "5",
}  # fmt: skip
OFF = ("--bf16",)
FOR_TESTS = "--log-interval 1 --cpu --no-one-logger --num-workers 0".split()
# The suite trains twins of kinds that no other test trains; `make twins` trains all.
IN_SUITE = ("open/deepseek-v2-lite",)
TWINS = [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.twins) for name in NAMES]


def twin_of(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return the ranks and the flags of a recipe's twin: two pipelines, or ranks that share documents."""
    small = [word for word in with_values(words, SIZES) if word not in OFF]
    kinds = [flag for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size") if flag in words]
    if len(kinds) < 2:  # documents in rings
        small[small.index("--hdp-tokens-per-rank") + 1] = "128"
    return 4 if kinds else 2, small + FOR_TESTS


@cache  # models of one family differ only in size
def trained(ranks: int, flags: tuple[str, ...]) -> Outcome:
    return train(ranks, *flags)


@pytest.mark.parametrize("name", TWINS)
def test_a_small_twin_trains(name: str, corpus: Path) -> None:
    words = shown(RECIPES[NAMES.index(name)], "flags", DATA=str(corpus)).splitlines()
    ranks, flags = twin_of(words)
    assert {word for word in words if word.startswith("--")} - {*OFF} <= {*flags}
    outcome = trained(ranks, tuple(flags))
    print(f"twin of {name}: {ranks} ranks, losses {' '.join(f'{loss:.3f}' for loss in outcome.losses)}")
    assert outcome.code is None
    assert len(outcome.losses) == 5
    assert all(0 < loss < 10 for loss in outcome.losses)
    assert outcome.losses[-1] < outcome.losses[0]
