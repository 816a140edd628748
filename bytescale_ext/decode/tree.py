"""Trees of guessed tokens, which the model checks in one forward pass.

The root is the last accepted token. The *joint probability* of a node is the product of the probabilities that the
draft heads give to the guesses on the path from the root to the node. The tree keeps the nodes with the largest joint
probabilities, as Clover-2 (arXiv 2408.00264) prunes its trees. The joint probability of a node is at most its parent's,
so the parent of every kept node is kept as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

LARGEST_TREE: Final = 256
"""The most guessed tokens of a tree, because attention between them stores all scores."""

Guess = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(head, states of nodes [n, ...], tokens [n]) -> (new states [n, ...], log-probabilities of their children [n, v])."""


@dataclass(frozen=True)
class TreeShape:
    """Limits of the trees.

    Attributes:
        num_tokens: the most guesses in a tree.
        top_p: probability mass of the children that a node may have, the most likely first.
        chain: whether the tree has no branches, so one guess per head.
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
        """The most nodes at one depth."""
        return 1 if self.chain else self.num_tokens


@dataclass(frozen=True)
class TokenTree:
    """A tree of tokens. Node 0 is the root, and parents come before their children.

    Attributes:
        tokens: token of each node.
        parents: parent of each node, -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of nodes above each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def visible(self) -> torch.Tensor:
        """Return the nodes that each node attends to, itself and its ancestors: bool [n, n]."""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def accepted_path(self, sampled: list[int]) -> list[int]:
        """Return the accepted nodes, from the root down: a child is accepted if its token is sampled at its parent.

        ``sampled``: the token that the model samples after each node.
        """
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path = [0]
        while (path[-1], sampled[path[-1]]) in children:
            path.append(children[path[-1], sampled[path[-1]]])
        return path


@dataclass
class _Growing:
    """A tree under construction: its nodes, their joint log-probabilities, and the nodes of the deepest level."""

    tokens: list[int]
    parents: list[int]
    joint: list[float]
    frontier: list[int]

    def add(self, log_probs: torch.Tensor, shape: TreeShape) -> list[int]:
        """Add the best children of the deepest level, and return the row of each child's parent in that level.

        ``log_probs``: log-probabilities of the children, [n, v].
        """
        joint = torch.tensor([self.joint[node] for node in self.frontier])
        rows, ids, values = _best_children(log_probs, joint, shape)
        self.parents += [self.frontier[row] for row in rows]
        self.tokens += ids
        self.joint += values
        self.frontier = list(range(len(self.tokens) - len(ids), len(self.tokens)))
        return rows

    def pruned(self, num_tokens: int) -> TokenTree:
        """Return the tree of the ``num_tokens`` most likely nodes."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.joint[node], node))[:num_tokens]
        kept = [0, *sorted(order)]  # nodes are numbered from the root down
        new_number = {node: number for number, node in enumerate(kept)}
        parents = (-1, *(new_number[self.parents[node]] for node in kept[1:]))
        return TokenTree(tuple(self.tokens[node] for node in kept), parents)


def grow_trees(
    roots: Sequence[int], states: torch.Tensor, depths: Sequence[int], guess: Guess, shape: TreeShape
) -> list[TokenTree]:
    """Grow one draft tree per root token, querying each draft head once for all trees.

    Args:
        roots: root tokens.
        states: states of the roots, the input of ``guess``, [n, ...].
        depths: maximum depth of each tree.
        guess: function that queries a draft head.
        shape: limits of the trees.
    """
    trees = [_Growing([root], [-1], [0.0], [0]) for root in roots]
    owners = list(range(len(trees)))  # the tree of each state
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
    """Return the best children of some nodes: rows of their parents, tokens and joint log-probabilities.

    The device of ``log_probs`` finds each node's best children. Only these are copied to the host.

    ``log_probs``: log-probabilities of the children, [n, v]; ``joint``: joint log-probabilities of the nodes, [n].
    """
    best_of_nodes = log_probs.float().topk(min(shape.width, log_probs.shape[1]), dim=1)
    values, ids = best_of_nodes.values.cpu(), best_of_nodes.indices.cpu()
    before = values.exp().cumsum(1) - values.exp()
    total = (values + joint[:, None]).masked_fill(before >= shape.top_p, -torch.inf).flatten()
    best = total.topk(min(shape.width, total.numel()))
    places = [int(place) for place, value in zip(best.indices, best.values, strict=True) if value > -torch.inf]
    return (
        [place // ids.shape[1] for place in places],
        [int(ids.flatten()[place]) for place in places],
        [float(total[place]) for place in places],
    )
