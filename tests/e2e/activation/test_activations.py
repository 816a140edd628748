"""Activation policies do not change results: gradients are bitwise equal to the gradients without a policy."""

from __future__ import annotations

import functools
import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request, TwoLevelPlan
from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepRecord
from tests.e2e.corpora import VOCAB, write_documents
from tests.e2e.devices import on_ghosts
from tests.e2e.oracle import gradients, relative_error
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, record_steps, step_losses, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

STEPS = [*TRAIN, "--train-iters", "2", "--num-layers", "4"]
DOCUMENTS = [*HDP, "--hdp-tokens-per-rank", "128"]
CLASSIC = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --normalization LayerNorm "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length 96 --max-position-embeddings 96"
).split()
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,0,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
).split()
TWO_STAGES = "--pipeline-model-parallel-size 2 --num-layers 6".split()  # a last stage swaps all layers except two
SLICES = "--micro-batch-size 1 --seq1f1b-slices 3".split()
# name: (ranks, flags)
CASES: dict[str, tuple[int, list[str]]] = {
    "hdp": (2, [*MODEL, *STEPS, *DOCUMENTS]),
    "hdp-tensor-sequence-parallel": (2, [*MODEL, *STEPS, *HDP, "--hdp-tokens-per-rank", "256", *TP_SP, "--bf16"]),
    "hdp-pipeline": (2, [*MODEL, *STEPS, *HDP, "--hdp-tokens-per-rank", "256", *TWO_STAGES]),
    "hdp-experts": (2, [*MODEL, *STEPS, *DOCUMENTS, *EXPERTS]),
    "hdp-later-tokens": (2, [*MODEL, *STEPS, *DOCUMENTS, "--mtp-num-layers", "2"]),
    "plain-classic": (1, [*CLASSIC, *STEPS, "--micro-batch-size", "2"]),
    "plain-grouped-pipeline": (2, [*MODEL, *STEPS, "--micro-batch-size", "2", *TWO_STAGES]),
    "plain-virtual-pipeline": (
        2,
        [*MODEL, *STEPS, "--micro-batch-size", "1", *TWO_STAGES, "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "hdp-slices-pipeline": (
        2,
        [*MODEL, *STEPS, *HDP, "--hdp-tokens-per-rank", "256", *TWO_STAGES, "--seq1f1b-slices", "3"],
    ),
    "eager-slices-pipeline": (2, [*MODEL, *STEPS, *SLICES, *TWO_STAGES, "--seq1f1b-eager"]),
}
OUR_ATTENTION = ["--swap-fraction", "0"]  # nothing else changes: the layers keep everything
HOST = ["--host-memory-gb", "0.02"]
AUTO = "--activation-policy auto --state-policy auto --state-page-mb 0.00390625".split()
POLICIES: dict[str, list[str]] = {
    "swap-only": ["--swap-fraction", "1", *HOST],
    "memo": ["--activation-policy", "memo", "--swap-fraction", "0.4", *HOST],
    "priced": ["--activation-policy", "priced", "--swap-fraction", "0.3", "--recompute-fraction", "0.5", *HOST],
    "keep-attention": ["--recompute-fraction", "1"],
    "auto": [*AUTO, *HOST, "--device-memory-gb", "0.00105", "--hdp-learn-costs", "off"],  # resident states take 0.0006
    "measured": ["--activation-policy", "memo", *HOST],
}
# Combinations that run: every policy with HDP, and "memo" or "priced", which differ most, in every layout.
RUNS = [
    *(("hdp", policy) for policy in POLICIES),
    ("hdp-tensor-sequence-parallel", "measured"),
    ("hdp-pipeline", "memo"),
    ("hdp-experts", "priced"),
    ("hdp-slices-pipeline", "priced"),
    ("hdp-later-tokens", "memo"),
    ("plain-grouped-pipeline", "priced"),
    ("plain-virtual-pipeline", "memo"),
    ("eager-slices-pipeline", "memo"),
]
SAMPLE = [
    ("hdp", "memo"),
    ("hdp-experts", "priced"),
]


def train_and_digest() -> None:
    """Entry that prints a digest of this rank's gradients in each step, and the actions of the policy."""
    import pretrain_gpt_hdp
    from megatron.bytescale import build
    from megatron.bytescale.features.activations import build as activations

    stores: list[Any] = []
    original_build, original_store = build.build, activations.make_store

    def make_store(*args: Any) -> Any:
        stores.append(original_store(*args))
        return stores[0]

    def build_with_digests(args: Any, runtime: Any) -> Any:
        return original_build(args, runtime).wrap_finalize(with_digests)

    def with_digests(finalize: Any) -> Any:
        def digest_and_finalize(chunks: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [one for chunk in chunks for one in chunk.parameters()]
            digest = 0
            for parameter in parameters:
                digest = zlib.crc32(parameter.main_grad.contiguous().cpu().numpy().tobytes(), digest)
            counts = asdict(stores[0].counts) if stores else {}
            peak = stores[0].link.arena.peak_bytes if stores else 0
            print(f"DIGEST {digest:08x} {json.dumps({**counts, 'peak': peak})}")
            print(f"GRADIENTS {json.dumps([fingerprint(one.main_grad) for one in parameters])}")
            return finalize(chunks, *args, **kwargs)

        return digest_and_finalize

    build.build, activations.make_store = build_with_digests, make_store
    pretrain_gpt_hdp.main()


def fingerprint(gradient: torch.Tensor) -> tuple[float, float]:
    """Return the norm of a gradient and its product with a fixed random direction, which identify the gradient."""
    flat = gradient.double().flatten().cpu()
    direction = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(len(flat)))
    return float(flat.norm()), float(flat @ direction)


def fingerprints(outcome: Outcome) -> np.ndarray:
    """Return the fingerprints of all gradients: [steps, parameters, 2]."""
    return np.array([json.loads(line) for line in re.findall(r"^GRADIENTS (.*)$", outcome.text, re.MULTILINE)])


def assert_same_gradients(one: Outcome, other: Outcome, first: float = 1e-5, second: float = 1e-5) -> None:
    """Assert equality relative to the norms: a processor may sum a product of fewer rows in another order."""
    mine, theirs = fingerprints(one), fingerprints(other)
    assert len(mine) == len(theirs) == 2
    tolerances = np.array([first, second])[:, None, None]
    assert (np.abs(mine - theirs) <= tolerances * mine[..., :1] + 1e-12).all()


def digests(outcome: Outcome) -> list[str]:
    return re.findall(r"^DIGEST (\w+)", outcome.text, re.MULTILINE)


def counts(outcome: Outcome) -> dict[str, int]:
    """Figures of the last step of a rank."""
    return json.loads(re.findall(r"^DIGEST \w+ (.*)$", outcome.text, re.MULTILINE)[-1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs")


@functools.cache
def outcomes_of(case: str, corpus: Path, *flags: str) -> list[Outcome]:
    num_ranks, case_flags = CASES[case]
    return train_ranks(num_ranks, *case_flags, "--data-path", corpus, *flags, entry=train_and_digest)


@pytest.mark.parametrize(("case", "policy"), sampled(RUNS, SAMPLE))
def test_gradients_are_those_of_no_policy(case: str, policy: str, corpus: Path) -> None:
    nothing = OUR_ATTENTION if case.startswith("plain") else []
    plain, planned = outcomes_of(case, corpus, *nothing), outcomes_of(case, corpus, *POLICIES[policy])
    assert [outcome.code for outcome in planned] == [None] * len(planned), planned[0].text[-2000:]
    assert ("GB of device memory): stage 1: " in planned[0].text) == (policy == "auto")
    for one, other in zip(plain, planned, strict=True):
        assert_same_gradients(one, other)
        done = counts(other)
        assert done["peak"] <= 0.02e9
        assert done["overflowed_bytes"] == 0
        if policy in ("auto", "measured"):  # these runs choose a policy
            assert done["swapped_bytes"] + done["recomputed_flops"] > 0
            continue
        assert (done["swapped_bytes"] > 0) == (policy != "keep-attention")
        if policy in ("memo", "priced"):
            assert done["late_reads"] == 0 < done["reads"]
        assert (done["recomputed_flops"] > 0) == (done["recomputed_bytes"] > 0) == (policy != "swap-only")
    assert sum("> bytescale: activations" in outcome.text for outcome in planned) == 1
    for line, is_there in (
        ("assumed, not measured", policy != "measured"),
        ("measured at start in", policy == "measured"),
    ):
        assert sum(f"> bytescale: {line}" in outcome.text for outcome in planned) == is_there


@pytest.mark.parametrize("case", sampled(["plain-classic", "plain-grouped-pipeline"], ["plain-classic"]))
def test_our_attention_trains_samples_as_megatrons_does(case: str, corpus: Path) -> None:
    """The order of sums differs, so the second step starts from weights that differ in the last bits."""
    for stock, ours in zip(outcomes_of(case, corpus), outcomes_of(case, corpus, *OUR_ATTENTION), strict=True):
        assert_same_gradients(stock, ours, 1e-5, 1e-3)
        if ours.losses:
            assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_a_memory_plan_in_training(corpus: Path, tmp_path: Path) -> None:
    """Swapped layers return to the buffers of the plan, and the first step is compared with the plan."""
    shape = ModelShape(4, 32, 4, 4, 8, 128, False, 128)
    traits = ModelTraits("LayerNorm", True, True, positions="learned_absolute", learned_positions=96,
                         tied_embeddings=True)  # fmt: skip
    shares = ActivationPlan("memo", 0.4, 0.6, 1.0, False, 2)
    record = StepRecord(shape, 2 * 96, "float32", None, shares, traits, "cpu")
    plan = plan_memory([Request("all", 3_000_000, 0, 1)])
    memory = StepMemory(record, 1 << 18, TwoLevelPlan({"forward": plan, "backward": plan}, plan))
    (tmp_path / "plan.json").write_text(json.dumps(memory.to_json()))
    words = [*POLICIES["memo"], "--memory-plan", tmp_path / "plan.json"]
    (plain,), (planned,) = (outcomes_of("plain-classic", corpus, *more) for more in (OUR_ATTENTION, words))
    assert len(digests(planned)) == 2
    assert digests(planned) == digests(plain)
    assert counts(planned)["swapped_bytes"] > 0 < counts(planned)["recomputed_flops"]
    assert len(re.findall(r"memory plan: 3\.000 MB planned, \d\.\d+ MB at most in the first step", planned.text)) == 1
    assert re.search(r"activations kept \d+\.\d swapped \d+\.\d recomputed \d+\.\d MB/step", planned.text)


ONE_SMALL_STEP = ["--train-iters", "1", "--global-batch-size", "2"]
PLANNED = {
    "tensor-pipeline-slices": (
        4,
        [*MODEL, *STEPS, *SLICES, *TWO_STAGES, *TP_SP, *ONE_SMALL_STEP],
        POLICIES["keep-attention"],
    ),
    "virtual-pipeline": (2, [*CASES["plain-virtual-pipeline"][1], *ONE_SMALL_STEP], POLICIES["memo"]),
}


@pytest.mark.parametrize("case", sampled(PLANNED, ["virtual-pipeline"]))
def test_a_memory_plan_of_a_pipeline(case: str, corpus: Path, tmp_path: Path) -> None:
    """Each rank records its own step and uses its own plan; losses and gradients do not change."""
    num_ranks, flags, policy = PLANNED[case]
    words = [*flags, *policy, "--data-path", corpus]
    file = tmp_path / "plan.json"
    recorded = train_ranks(num_ranks, *words, "--record-memory-plan", file, entry=train_and_digest)
    planned = train_ranks(num_ranks, *words, "--memory-plan", file, entry=train_and_digest)
    plans = PlanFile.from_json(json.loads(file.read_text()))
    for one, other in zip(recorded, planned, strict=True):
        assert one.code is other.code is None, other.text[-2000:]
        assert digests(one) == digests(other) != []
        assert one.losses == other.losses
    for rank, (one, other) in enumerate(zip(recorded, planned, strict=True)):
        memory = plans.plan_of(*divmod(rank, num_ranks // 2))
        peak = memory.plan.model.peak
        (planned_mb, live_mb) = re.findall(r"memory plan of .* ([\d.]+) MB planned, ([\d.]+) MB live", one.text)[0]
        assert planned_mb == f"{peak / 1e6:.3f}"
        assert float(live_mb) <= float(planned_mb) <= 1.25 * float(live_mb)  # small steps leave gaps
        (again_mb, used_mb) = re.findall(r"memory plan of .* ([\d.]+) MB planned, ([\d.]+) MB at most", other.text)[0]
        assert again_mb == planned_mb
        buffers = 2 * memory.buffer_bytes / 1e6
        rounding = 0.02 * float(live_mb) if on_ghosts() else 1e-3  # blocks of the allocator are multiples of 512 bytes
        assert float(live_mb) - buffers <= float(used_mb) <= float(live_mb) + buffers + rounding
        assert (memory.buffer_bytes > 0) == (policy == POLICIES["memo"])
    assert len(plans.plans) >= 2  # stages differ


@pytest.mark.full
def test_recompute_of_experts_alone_combines(corpus: Path) -> None:
    flags = "--recompute-granularity selective --recompute-modules moe".split()
    plain = outcomes_of("hdp-experts", corpus)
    planned = outcomes_of("hdp-experts", corpus, *flags, *POLICIES["memo"])
    for one, other in zip(plain, planned, strict=True):
        assert digests(other) == digests(one)


def test_offload_by_the_plan_widens_shards_and_keeps_the_gradients(corpus: Path, tmp_path: Path) -> None:
    """With C = 64 on 2 ranks, documents of 256 tokens fit only if some of their activations are in host memory."""
    link = [
        "--link-gb-per-second",
        "1e9",
        "--hdp-learn-costs",
        "off",
    ]  # a toy layer has hardly any computation for its bytes
    flags = {
        "plain": ["--hdp-tokens-per-rank", "128"],
        "offload": ["--hdp-tokens-per-rank", "64", "--activation-policy", "offload", *HOST, *link],
    }
    found = {}
    for name, words in flags.items():
        folder = tmp_path / name
        save = ["--save", folder, "--save-wgrads-interval", "1", "--hdp-log-dir", folder]
        model = [*MODEL, *STEPS, *HDP, "--data-path", corpus, *words, *save]
        outcomes = train_ranks(2, *model, entry=record_steps)
        assert outcomes[0].code is None, outcomes[0].text[-2000:]
        found[name] = outcomes, gradients(folder), step_losses(folder)
    (_, expected, losses), (outcomes, got, offloaded) = found["plain"], found["offload"]
    assert offloaded == pytest.approx(losses, rel=1e-5)
    assert got.keys() == expected.keys()
    assert max(relative_error(got[name], expected[name]) for name in got) < 1e-5
    assert "a sequence of 256 tokens needs 2 ranks instead of 4" in outcomes[0].text
    rows = [json.loads(line) for line in (tmp_path / "offload" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["swapped_megabytes_per_step"] > 0 and row["host_peak_megabytes"] <= 20 for row in rows)
    assert "MB/step, host peak" in outcomes[-1].text
    widest = max(max(record["lengths"]) for record in outcomes[0].records())
    assert widest > 2 * 64  # more than fits on both ranks without offloading


CHUNKED = ["hdp", "hdp-tensor-sequence-parallel", "plain-classic"]


@pytest.mark.full
@pytest.mark.parametrize("case", CHUNKED)
def test_chunked_loss_trains_as_the_whole(case: str, corpus: Path) -> None:
    plain = outcomes_of(case, corpus)
    chunked = outcomes_of(case, corpus, "--chunked-cross-entropy", "24")
    for one, other in zip(plain, chunked, strict=True):
        assert len(digests(other)) == 2
        if other.losses:
            assert other.losses == pytest.approx(one.losses, rel=1e-4 if "parallel" in case else 1e-6)


@pytest.mark.full
def test_chunked_loss_and_policy_together(corpus: Path) -> None:
    flags = ["--chunked-cross-entropy", "24"]
    plain, planned = (outcomes_of("hdp", corpus, *flags, *more) for more in ([], POLICIES["memo"]))
    assert [digests(one) for one in planned] == [digests(one) for one in plain]


def fail_in_a_step() -> None:
    """Entry whose second backward pass of the first layer raises. Then the memory of the step must be free."""
    import gc

    import pretrain_gpt_hdp
    from bytescale_ext.activation.run import Rebuilding
    from megatron.bytescale.features.activations import build as activations

    stores: list[Any] = []
    original_store, original_attention = activations.make_store, Rebuilding.attention

    def make_store(*args: Any) -> Any:
        stores.append(original_store(*args))
        return stores[0]

    def attention(run: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if stores[0].counts.recomputed_flops > 2_000_000:
            raise RuntimeError("stop here")
        return original_attention(run, *args, **kwargs)

    activations.make_store, Rebuilding.attention = make_store, attention  # type: ignore[method-assign]
    try:
        pretrain_gpt_hdp.main()
    except RuntimeError as error:
        print(f"FAILED {error}")
    gc.collect()
    stores[0].check_empty()
    print("EMPTY")


def test_an_exception_in_mid_step_leaves_no_buffer_in_use(corpus: Path) -> None:
    flags = [*CASES["plain-classic"][1], "--data-path", corpus, *POLICIES["memo"]]
    outcome = train_ranks(1, *flags, entry=fail_in_a_step)[0]
    assert "FAILED stop here" in outcome.text
    assert "EMPTY" in outcome.text
