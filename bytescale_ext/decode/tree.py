"""Trees of guessed tokens: which guesses a model is asked to check in one forward pass.

The root is the last token that is certain. A node's *joint probability* is that of all guesses from the root down to
it, in the heads' own view. Of all nodes that the heads can make, the tree has those with the largest joint probability,
as Clover-2 (arXiv 2408.00264) prunes its trees. A node is never above its parent, so the parent of each node is there.
"""

from __future__ import annotations

from collections.abc import Callable
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


def grow_tree(root: int, state: torch.Tensor, num_heads: int, guess: Guess, shape: TreeShape) -> TokenTree:
    """Return the tree below a token.

    Args:
        root: the token.
        state: of the root, for ``guess``, [1, ...].
        num_heads: the greatest depth.
        guess: asks the heads.
        shape: which nodes are taken.
    """
    tokens, parents, joint = [root], [-1], [0.0]
    frontier, states = [0], state
    for head in range(num_heads):
        states, log_probs = guess(head, states, torch.tensor([tokens[node] for node in frontier]))
        rows, ids, values = _best_children(log_probs, torch.tensor([joint[node] for node in frontier]), shape)
        parents += [frontier[row] for row in rows]
        tokens += ids
        joint += values
        frontier, states = list(range(len(tokens) - len(ids), len(tokens))), states[rows]
    order = sorted(range(1, len(tokens)), key=lambda node: (-joint[node], node))[: shape.num_tokens]
    kept = [0, *sorted(order)]  # nodes are numbered from the root down
    place = {node: index for index, node in enumerate(kept)}
    return TokenTree(tuple(tokens[node] for node in kept), (-1, *(place[parents[node]] for node in kept[1:])))


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
