"""Draft trees against an enumeration of all nodes, and the nodes that a model accepts."""

from __future__ import annotations

from itertools import product
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.decode.tree import TokenTree, TreeShape, grow_trees

VOCAB, DEPTH = 4, 3


def table(seed: int) -> torch.Tensor:
    """Return log-probabilities of a token after another token: [v, v]."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(VOCAB, VOCAB, generator=generator)).log_softmax(-1)


def grown(seed: int, shape: TreeShape, root: int = 1) -> TokenTree:
    """Grow a tree with heads that depend on the previous token. Their states are the paths, to check their order."""
    chances, paths = table(seed), torch.zeros(1, DEPTH + 1, dtype=torch.int64)

    def guess(head: int, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = states.clone()
        states[:, head] = tokens
        assert states.unique(dim=0).shape == states.shape  # no two nodes have the same path
        return states, chances[tokens]

    (tree,) = grow_trees([root], paths, [DEPTH], guess, shape)
    return tree


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert parent < len(found)
        found.append(() if parent < 0 else (*found[parent], token))
    assert len(set(found)) == len(found)
    return set(found[1:])


def joint(seed: int, path: tuple[int, ...], root: int = 1) -> float:
    chances = table(seed)
    return sum(float(chances[before, token]) for before, token in zip((root, *path), path, strict=False))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 20, 84, 200])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_nodes_are_taken(seed: int, num_tokens: int) -> None:
    every = [path for depth in range(1, DEPTH + 1) for path in product(range(VOCAB), repeat=depth)]
    best = sorted(every, key=lambda path: -joint(seed, path))[:num_tokens]
    assert paths_of(grown(seed, TreeShape(num_tokens, top_p=1.0))) == set(best)


@pytest.mark.parametrize("seed", range(4))
def test_top_p_leaves_unlikely_guesses_out(seed: int) -> None:
    top_p = 0.8
    found = paths_of(grown(seed, TreeShape(200, top_p)))
    for path in found:
        assert path[:-1] in found | {()}
    for before in [(1,), *((1, *path) for path in found if len(path) < DEPTH)]:
        chances = sorted(((float(p), token) for token, p in enumerate(table(seed)[before[-1]].exp())), reverse=True)
        taken, total = set(), 0.0
        for chance, token in chances:
            if total >= top_p:
                break
            taken.add(token)
            total += chance
        assert {path[-1] for path in found if path[:-1] == before[1:]} == taken


@pytest.mark.parametrize("shape", [TreeShape(7, 0.9), TreeShape(20, chain=True), TreeShape(60, 1.0)])
def test_trees_that_grow_together_are_those_that_grow_alone(shape: TreeShape) -> None:
    roots, depths, chances, calls = [1, 0, 3, 2], [3, 0, 1, 2], table(5), [0]

    def guess(head: int, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        assert states.shape == tokens.shape
        return states + 1, (chances[tokens] + chances[(states * (head + 1)).long() % VOCAB]).log_softmax(-1)

    states = torch.tensor([4.0, 7.0, 1.0, 2.0])
    together = grow_trees(roots, states, depths, guess, shape)
    assert calls == [DEPTH]
    places = range(len(roots))
    alone = [grow_trees([roots[i]], states[i : i + 1], [depths[i]], guess, shape)[0] for i in places]
    assert together == alone
    assert [max(tree.depths) for tree in together] == depths
    assert together[1] == TokenTree((0,), (-1,))


def test_nodes_see_those_above_them() -> None:
    tree = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3))
    assert tree.depths == (0, 1, 1, 2, 3)
    assert [row.nonzero().flatten().tolist() for row in tree.visible()] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
    ]


@pytest.mark.parametrize(
    ("chosen", "path"), [([5, 0, 0, 0], [0]), ([2, 0, 9, 0], [0, 2]), ([1, 3, 0, 7], [0, 1, 3]), ([1, 1, 0, 0], [0, 1])]
)
def test_what_the_model_accepts(chosen: list[int], path: list[int]) -> None:
    assert TokenTree((9, 1, 2, 3), (-1, 0, 0, 1)).accepted_path(chosen) == path


def test_certain_guesses_keep_their_parents() -> None:
    """A draft of probability 1 is as likely as its parent, which must still come first."""
    certain = torch.full((1, VOCAB), log(1e-30))
    certain[0, 2] = log(1.0)

    def guess(head: int, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states, certain.expand(len(tokens), -1)

    (tree,) = grow_trees([0], torch.zeros(1), [3], guess, TreeShape(2))
    assert tree == TokenTree((0, 2, 2), (-1, 0, 1))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=30), st.lists(st.integers(0, 5), min_size=31)
)
def test_any_tree(branches: list[tuple[int, int]], chosen: list[int]) -> None:
    """A node attends to itself and its ancestors. The accepted path is the longest path that matches the choices."""
    parents, tokens = [-1], [0]
    for above, token in branches:
        parent = above % len(parents)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    tree = TokenTree(tuple(tokens), tuple(parents))
    visible = tree.visible()
    for node in range(len(tokens)):
        above, path = node, []
        while above >= 0:
            path.append(above)
            above = parents[above]
        assert visible[node].nonzero().flatten().tolist() == sorted(path)
        assert tree.depths[node] == len(path) - 1
    followed = [0]
    for node in range(1, len(tokens)):  # children come after their parents
        if parents[node] == followed[-1] and tokens[node] == chosen[parents[node]]:
            followed.append(node)
    assert tree.accepted_path(chosen) == followed
