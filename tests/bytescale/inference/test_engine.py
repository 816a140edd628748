"""Decoding from a checkpoint: drafts do not change the text, and logits equal Megatron's own layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.bytescale.inference.engine import Generation, described
from megatron.bytescale.inference.export import export_heads
from tests.e2e.corpora import VOCAB, documents
from tests.e2e.drafts import COMMON, EXPERTS, LATENT, LAYOUTS, ONE, WINDOWS, heads_of, trunk
from tests.e2e.oracle import train_with_named_weights
from tests.e2e.training import MODEL, train_once
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

NEW_TOKENS = 10


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (4,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def stock_model(model: Any, args: Any) -> Any:
    """Return Megatron's model with its own dense attention and the same weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    config = gpt_config_from_args(args)
    stock: Any = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    found = stock.load_state_dict(model.state_dict(), strict=False)
    assert not found.missing_keys
    return stock.eval()


def decode(rank: int, world: int, load: Path, draft: Path) -> dict[str, Any]:
    """Return the text of each mode, the choices of stock layers, and the number of accepted drafts."""
    from bytescale_ext.decode.sampler import Sampler
    from bytescale_ext.decode.tree import TreeShape
    from megatron.bytescale.inference import engine, passes
    from megatron.bytescale.inference.load import open_decoder

    decoder, args = open_decoder(load, draft, on_cpu=True)
    choose = Sampler(0.0, VOCAB)
    shapes = {"plain": None, "tree": TreeShape(60, 1.0), "small": TreeShape(3), "chain": TreeShape(9, chain=True)}
    requests = {name: engine.GenerationRequest(NEW_TOKENS, choose, shape) for name, shape in shapes.items()}
    found: dict[str, Any] = {name: [] for name in shapes}
    passes.SLICE_TOKENS = 7
    for name, request in requests.items():
        streamed: list[int] = []
        for prompt in prompts():
            streamed.clear()
            done = decoder.generate(prompt, request, streamed.extend)
            assert streamed == done.tokens
            assert done.target_forwards == len(done.accepted)
            assert len(done.tokens) == 1 + sum(done.accepted) + done.target_forwards
            found[name].append(done)
        for batch in (3, 40):
            found[f"{name} {batch}"] = decoder.generate_all(prompts(), replace(request, batch=batch))
    sampled = replace(choose, temperature=1.0, seed=5)
    for name, request in requests.items():
        for batch in (1, 40):
            done = decoder.generate_all(prompts(), replace(request, choose=sampled, batch=batch))
            found[f"sampled {name} {batch}"] = [one.tokens for one in done]
    stock = stock_model(decoder.model, args)
    with torch.no_grad():
        for prompt, done in zip(prompts(), found["plain"], strict=True):
            ids = torch.tensor([prompt + done.tokens])
            mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            logits = stock(ids, torch.arange(ids.shape[1])[None], mask)
            found.setdefault("stock", []).append(choose(logits[0], [])[len(prompt) - 1 : -1])
    first = found["plain"][0].tokens
    ended = decoder.generate(
        prompts()[0], engine.GenerationRequest(NEW_TOKENS, choose, TreeShape(60, 1.0), end=first[4])
    )
    found["ended"] = ended.tokens, first[: first.index(first[4]) + 1]
    for bad in ([], [1] * (decoder.context - NEW_TOKENS + 1)):
        with pytest.raises(ValueError, match=r"prompt is empty|exceed the context of 256 tokens"):
            decoder.generate(bad, requests["plain"])
    return found


def test_drafts_change_nothing() -> None:
    (found,) = run_ranks(decode, 1, trunk(), heads_of(1, *ONE).save, init_group=False)
    plain = [done.tokens for done in found["plain"]]
    assert plain == found["stock"]
    assert all(len(tokens) == NEW_TOKENS for tokens in plain)
    for name in ("tree", "small", "chain"):
        assert [done.tokens for done in found[name]] == plain
    for name, batch in product(("plain", "tree", "small", "chain"), (3, 40)):  # texts in a batch equal separate texts
        for done, alone in zip(found[f"{name} {batch}"], found[name], strict=True):
            assert (done.tokens, done.accepted, done.target_forwards) == (
                alone.tokens, alone.accepted, alone.target_forwards
            )  # fmt: skip
    sampled = [found[f"sampled {name} {batch}"] for name in ("plain", "tree", "small", "chain") for batch in (1, 40)]
    assert all(texts == sampled[0] for texts in sampled)
    assert all(text != plainly for text, plainly in zip(sampled[0], plain, strict=True))
    accepted = {name: sum(sum(done.accepted) for done in found[name]) for name in ("plain", "small", "tree")}
    assert accepted["plain"] == 0
    assert 0 < accepted["small"] < accepted["tree"]
    assert found["ended"][0] == found["ended"][1]


def streamed(rank: int, world: int, load: Path) -> Any:
    """Return the events of three texts, two at a time."""
    from bytescale_ext.decode.sampler import Sampler
    from bytescale_ext.decode.tree import TreeShape
    from megatron.bytescale.inference.engine import GenerationRequest
    from megatron.bytescale.inference.load import open_decoder

    decoder, _ = open_decoder(load, None, on_cpu=True)
    choose = Sampler(1.0, VOCAB, seed=3)
    request = GenerationRequest(NEW_TOKENS, choose, TreeShape(5), batch=2)
    events = [(index, list(new), done) for index, new, done in decoder.stream(prompts()[:3], request)]
    return [(index, new, done and done.tokens) for index, new, done in events]


@pytest.mark.full
def test_tensor_parallel_ranks_decode_together() -> None:
    """Two ranks take the same steps, greedy and sampled, and generate the text of one process."""
    heads = heads_of(1, *ONE).save
    first, second = run_ranks(streamed, 2, heads)
    assert first == second
    (alone,) = run_ranks(streamed, 1, heads, init_group=False)
    assert [text for _, _, text in first if text] == [text for _, _, text in alone if text]
    assert [index for index, _, _ in first][:2] == [
        0,
        1,
    ]  # two texts begin together, and the third begins when another has ended
    begun = [index for index, _, _ in first].index(2)
    assert any(text for _, _, text in first[:begun])
    for number in range(3):
        new = [token for index, tokens, _ in first if index == number for token in tokens]
        (whole,) = [text for index, _, text in first if index == number and text]
        assert new == whole
        assert len(whole) == NEW_TOKENS


def tokens_of(rank: int, world: int, folders: list[tuple[Path, Path | None]]) -> list[list[list[int]]]:
    """Return the texts of each folder of checkpoints with its own heads, and the accepted drafts of each text."""
    from bytescale_ext.decode.sampler import Sampler
    from bytescale_ext.decode.tree import TreeShape
    from megatron.bytescale.inference.engine import GenerationRequest
    from megatron.bytescale.inference.load import open_decoder

    request = GenerationRequest(NEW_TOKENS, Sampler(0.0, VOCAB), TreeShape(20), batch=8)
    found = []
    for folder, draft in folders:
        decoder, _ = open_decoder(folder, draft, on_cpu=True)
        done = decoder.generate_all(prompts(), request)
        found.append([one.tokens for one in done] + [one.accepted for one in done])
    return found


@pytest.mark.full
def test_checkpoints_of_any_layout_and_heads_on_their_own(tmp_path: Path) -> None:
    """Checkpoints are from one process, tensor-parallel ranks and a pipeline. Their weights differ only by rounding."""
    layouts = (LAYOUTS[name] for name in LAYOUTS)
    saved = [heads_of(1, *ONE).save, *(heads_of(ranks, *flags).save for ranks, flags in layouts)]
    exported = tmp_path / "heads"
    export_heads(saved[0], exported)
    (found,) = run_ranks(tokens_of, 1, [*((folder, None) for folder in saved), (trunk(), exported)], init_group=False)
    assert len(found) == 4
    assert found[1:] == found[:1] * 3
    cut = run_ranks(tokens_of, 2, [(trunk(), exported), (saved[1], None)])  # read by two ranks
    assert cut == [found[:2]] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [EXPERTS, [*EXPERTS, "--moe-latent-size", "12"], LATENT, WINDOWS],
    ids=["experts", "experts of latents", "latent attention", "windows"],
)
def test_drafts_of_other_models_change_nothing(model: list[str]) -> None:
    save = heads_of(1, *ONE, model=model).save
    (plain,) = run_ranks(decode_alone, 1, [trunk(model)], init_group=False)
    for ranks in (1, 2):
        for found in run_ranks(tokens_of, ranks, [(save, None)], init_group=ranks > 1):
            (texts,) = found
            assert texts[: len(plain[0])] == plain[0]
            assert sum(map(sum, texts[len(plain[0]) :])) > 0  # accepted guesses


def test_figures_of_texts() -> None:
    one, other = Generation([1, 2, 3, 4], 2, [1, 0], 0.5), Generation([5], 0, [], 0.25)
    assert one.figures() == {
        "tokens": [1, 2, 3, 4], "target_forwards": 2, "accepted": [1, 0], "tokens_per_second": 8.0,
    }  # fmt: skip
    wanted = "5 tokens in 2 forward passes after the prompt, 0.500 guesses accepted each, 10.0 tokens/s"
    assert described([one, other], 0.5, has_heads=True) == wanted
    assert described([other], 1.0, has_heads=True).startswith(
        "1 tokens in 0 forward passes after the prompt, 0.000 guesses"
    )
    assert described([one], 0.5, has_heads=False) == "4 tokens in 2 forward passes after the prompt, 8.0 tokens/s"


def decode_alone(rank: int, world: int, folders: list[Path]) -> list[list[list[int]]]:
    """Return the tokens that each model adds to the prompts."""
    from bytescale_ext.decode.sampler import Sampler
    from megatron.bytescale.inference.engine import GenerationRequest
    from megatron.bytescale.inference.load import open_decoder

    request = GenerationRequest(NEW_TOKENS, Sampler(0.0, VOCAB))
    decoders = [open_decoder(folder, None, on_cpu=True)[0] for folder in folders]
    return [[decoder.generate(prompt, request).tokens for prompt in prompts()] for decoder in decoders]


def test_a_model_with_later_layers_decodes_without_them() -> None:
    """Losses of later tokens have no weight here, so the model is trained as without their layers."""
    common = [*MODEL, *COMMON, "--data-path", documents(), *ONE, "--train-iters", 1]
    later = ["--mtp-num-layers", 1, "--mtp-loss-scaling-factor", 0]
    folders = [train_once(1, *common, *flags, entry=train_with_named_weights).save for flags in ([], later)]
    alone, with_later = run_ranks(decode_alone, 1, folders)[0]
    assert alone == with_later
    assert len({tuple(tokens) for tokens in alone}) > 1
