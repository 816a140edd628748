"""Sampling with trees has the distribution of plain sampling, and greedy choices are the largest logits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bytescale_ext.decode.sampler import Place, Sampler
from bytescale_ext.decode.tree import TreeShape, grow_trees

VOCAB = 4
CHI_SQUARE_999 = {15: 37.70}  # 99.9 % of the draws are below it, for this number of degrees of freedom


def tables(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the model's logits after each token, [v, v], its distribution, and other log-probabilities of heads."""
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, VOCAB, VOCAB, generator=generator) * 1.5
    return logits, (logits / temperature).softmax(-1), other.log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "temperature", "draws"),
    [(TreeShape(6), 1.0, 10_000), pytest.param(TreeShape(2, chain=True), 0.7, 50_000, marks=pytest.mark.full)],
)
def test_two_tokens_have_the_distribution_of_plain_sampling(shape: TreeShape, temperature: float, draws: int) -> None:
    logits, chances, heads = tables(temperature)
    choose = Sampler(temperature, VOCAB, seed=7)
    root = 2
    (tree,) = grow_trees([root], torch.zeros(1), [2], lambda head, s, t: (s.expand(len(t)), heads[t]), shape)
    nodes = [Place(text, 1 + depth) for text in range(draws) for depth in tree.depths]
    chosen = torch.tensor(choose(logits[list(tree.tokens)].repeat(draws, 1), nodes)).view(draws, -1).tolist()
    plain = choose(logits[[of_nodes[0] for of_nodes in chosen]], [Place(text, 2) for text in range(draws)])
    seen: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for of_nodes, second in zip(chosen, plain, strict=True):
        path = tree.accepted_path(of_nodes)
        accepted += len(path) - 1
        seen[of_nodes[0], of_nodes[path[1]] if len(path) > 1 else second] += 1
    assert accepted > draws / 8  # some drafts are accepted
    expected = {(a, b): draws * float(chances[root, a] * chances[a, b]) for a in range(VOCAB) for b in range(VOCAB)}
    assert min(expected.values()) > 5
    assert sum((seen[pair] - mean) ** 2 / mean for pair, mean in expected.items()) < CHI_SQUARE_999[VOCAB**2 - 1]


def test_a_token_depends_on_its_seed_text_and_position_alone() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).repeat(300, 1)
    places = [Place(text, position) for text in range(3) for position in range(100)]
    tokens = Sampler(1.0, 50, seed=-1)(logits, places)
    assert Sampler(1.0, 50, seed=-1)(logits[:7], places[200:207]) == tokens[200:207]
    assert Sampler(1.0, 50, seed=2)(logits, places) != tokens
    assert len({tuple(tokens[start : start + 100]) for start in (0, 100, 200)}) == 3


def test_tokens_without_probability_are_never_taken() -> None:
    logits = torch.full((2000, 9), float("-inf"))
    logits[:, [2, 5]] = 0.0
    tokens = Sampler(1.0, 8)(logits, [Place(0, position) for position in range(2000)])
    assert set(tokens) == {2, 5}
