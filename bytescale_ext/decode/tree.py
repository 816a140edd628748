"""Trees of guessed tokens: which guesses a model is asked to check in one forward pass.

The root is the last token that is certain. A node's *joint probability* is that of all guesses from the root down to
it, in the heads' own view. Of all nodes that the heads can make, the tree has those with the largest joint probability,
as Clover-2 (arXiv 2408.00264) prunes its trees. A node is never above its parent, so the parent of each node is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

LARGEST_TREE: Final = 256
"""Guessed tokens of a tree: their attention keeps all scores."""

Guess = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(head, states of nodes [n, ...], their tokens [n]) -> (states [n, ...], log-probabilities of children [n, v])."""


@dataclass(frozen=True)
class TreeShape:
    """Which trees are made.

    Attributes:
        num_tokens: the most guesses of a tree.
        top_p: of the guesses of one node, the likeliest ones whose probabilities make up this much.
        chain: one guess for each head, without branches.
    """

    num_tokens: int
    top_p: float = 0.95
    chain: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= LARGEST_TREE:
            raise ValueError(f"--tree-tokens {self.num_tokens}: give 1 to {LARGEST_TREE}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p:g} must be above 0 and at most 1")

    @property
    def width(self) -> int:
        """The most nodes of one depth."""
        return 1 if self.chain else self.num_tokens


@dataclass(frozen=True)
class TokenTree:
    """Nodes in an order in which parents come before their children; the root is node 0.

    Attributes:
        tokens: of each node.
        parents: node above each node, -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of nodes above each node."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    def visible(self) -> torch.Tensor:
        """Return which nodes each node attends to, itself and those above it: bool [n, n]."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen

    def walk(self, chosen: list[int]) -> list[int]:
        """Return the nodes that the model accepts, from the root down.

        Args:
            chosen: of each node, the token that the model puts after it. As long as it is a child of the node, this
                child is accepted.
        """
        children = {place: node for node, place in enumerate(zip(self.parents, self.tokens, strict=True))}
        path = [0]
        while (path[-1], chosen[path[-1]]) in children:
            path.append(children[path[-1], chosen[path[-1]]])
        return path


@dataclass
class _Growing:
    """A tree that grows: its nodes, their joint log-probabilities, and the nodes of the last depth."""

    tokens: list[int]
    parents: list[int]
    joint: list[float]
    frontier: list[int]

    def add(self, log_probs: torch.Tensor, shape: TreeShape) -> list[int]:
        """Add the best guesses after the last depth; return of each the row of its parent. ``log_probs``: [n, v]."""
        joint = torch.tensor([self.joint[node] for node in self.frontier])
        rows, ids, values = _best_children(log_probs, joint, shape)
        self.parents += [self.frontier[row] for row in rows]
        self.tokens += ids
        self.joint += values
        self.frontier = list(range(len(self.tokens) - len(ids), len(self.tokens)))
        return rows

    def pruned(self, num_tokens: int) -> TokenTree:
        """Return the tree of the likeliest nodes."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.joint[node], node))[:num_tokens]
        kept = [0, *sorted(order)]  # nodes are numbered from the root down
        place = {node: index for index, node in enumerate(kept)}
        parents = (-1, *(place[self.parents[node]] for node in kept[1:]))
        return TokenTree(tuple(self.tokens[node] for node in kept), parents)


def grow_trees(
    roots: Sequence[int], states: torch.Tensor, depths: Sequence[int], guess: Guess, shape: TreeShape
) -> list[TokenTree]:
    """Return the trees below some tokens; the heads are asked once for each depth, for all trees together.

    Args:
        roots: the tokens.
        states: of the roots, for ``guess``, [n, ...].
        depths: the greatest depth of each tree.
        guess: asks the heads.
        shape: which nodes are taken.
    """
    trees = [_Growing([root], [-1], [0.0], [0]) for root in roots]
    owners = list(range(len(trees)))  # of each state, its tree
    for head in range(max(depths)):
        growing = [row for row, owner in enumerate(owners) if depths[owner] > head]
        nodes = [tree.tokens[node] for tree, depth in zip(trees, depths, strict=True) if depth > head
                 for node in tree.frontier]  # fmt: skip
        states, log_probs = guess(head, states[growing], torch.tensor(nodes))
        start, picked, owners = 0, [], []
        for owner, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
            if depth > head:
                stop = start + len(tree.frontier)
                rows = tree.add(log_probs[start:stop], shape)
                picked += [start + row for row in rows]
                owners += [owner] * len(rows)
                start = stop
        states = states[picked]
    return [tree.pruned(shape.num_tokens) for tree in trees]


def _best_children(
    log_probs: torch.Tensor, joint: torch.Tensor, shape: TreeShape
) -> tuple[list[int], list[int], list[float]]:
    """Return (parent's row, token, joint log-probability) of the best guesses after nodes.

    ``log_probs``: [n, v]; ``joint``: of the nodes, [n].
    """
    values, ids = log_probs.float().cpu().topk(min(shape.width, log_probs.shape[1]), dim=1)
    before = values.exp().cumsum(1) - values.exp()
    total = (values + joint[:, None]).masked_fill(before >= shape.top_p, -torch.inf).flatten()
    best = total.topk(min(shape.width, total.numel()))
    places = [int(place) for place, value in zip(best.indices, best.values, strict=True) if value > -torch.inf]
    return (
        [place // ids.shape[1] for place in places],
        [int(ids.flatten()[place]) for place in places],
        [float(total[place]) for place in places],
    )
