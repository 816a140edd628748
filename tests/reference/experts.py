"""Mixtures of experts in plain PyTorch, one token at a time in meaning: no capacity, no groups of devices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.reference.settings import HIDDEN, Experts

MARGIN = 3e-6
"""Smallest difference between the scores of a chosen and of a rejected expert that rounding cannot change."""


def expert_shapes(experts: Experts, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's router, experts and shared expert; their names begin with ``prefix``."""
    found: dict[str, tuple[int, ...]] = {prefix + "router.weight": (experts.count, HIDDEN)}
    for number in range(experts.count):
        found |= _swiglu_shapes(f"{prefix}experts.local_experts.{number}.", experts.width, experts.latent or HIDDEN)
    if experts.latent is not None:
        found[prefix + "fc1_latent_proj.weight"] = (experts.latent, HIDDEN)
        found[prefix + "fc2_latent_proj.weight"] = (HIDDEN, experts.latent)
    if experts.shared is not None:
        found |= _swiglu_shapes(f"{prefix}shared_experts.", experts.shared)
    if experts.is_shared_gated:
        found[f"{prefix}shared_experts.gate_weight"] = (1, HIDDEN)
    return found


def _swiglu_shapes(prefix: str, width: int, size: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {prefix + "linear_fc1.weight": (2 * width, size), prefix + "linear_fc2.weight": (size, width)}


def _swiglu(weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weights[prefix + "linear_fc1.weight"].T).chunk(2, -1)
    return (F.silu(gate) * up) @ weights[prefix + "linear_fc2.weight"].T


class Router:
    """Router and experts of one layer.

    Attributes:
        bias: bias of each expert that only the choice sees, [experts].
        counts: tokens of the running step that chose each expert, [experts].
        best_counts: tokens of the running step with each expert among their highest scores, [experts].
        last_counts: ``best_counts`` of the step before.
        document_losses: balancing loss of each document of the running step, times its tokens, scalars.
        score_sums: sum of the normalized scores of each document's tokens, each [experts].
        z_losses: squared log-sum-exp of the router's scores of each document of the running step, each [n].
    """

    def __init__(self, experts: Experts | None) -> None:
        assert experts is not None
        self.experts = experts
        self.bias = torch.zeros(experts.count, dtype=torch.float64)
        self.counts = torch.zeros(experts.count, dtype=torch.float64)
        self.best_counts = self.last_counts = torch.zeros(experts.count, dtype=torch.float64)
        self.document_losses: list[torch.Tensor] = []
        self.score_sums: list[torch.Tensor] = []
        self.z_losses: list[torch.Tensor] = []

    def __call__(self, weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts, weighted, for ``x`` [n, h]: [n, h]."""
        logits = x @ weights[prefix + "router.weight"].T
        self.z_losses.append(logits.logsumexp(-1).square())
        shares = self.shares(logits)
        self.counts += (shares > 0).sum(0)
        self.note_balance(logits)
        tokens = x if self.experts.latent is None else x @ weights[prefix + "fc1_latent_proj.weight"].T
        result = torch.zeros_like(tokens)
        for number in range(self.experts.count):
            rows = shares[:, number].nonzero()[:, 0]
            output = _swiglu(weights, f"{prefix}experts.local_experts.{number}.", tokens[rows])
            result = result.index_add(0, rows, output * shares[rows, number, None])
        if self.experts.latent is not None:
            result = result @ weights[prefix + "fc2_latent_proj.weight"].T
        if self.experts.shared is not None:
            always = _swiglu(weights, prefix + "shared_experts.", x)
            gate = weights.get(prefix + "shared_experts.gate_weight")
            result = result + (always if gate is None else always * (x @ gate.T).sigmoid())
        return result

    def note_balance(self, logits: torch.Tensor) -> None:
        """Note a document's balancing loss, and its scores. ``logits``: [n, experts].

        The losses take the experts with the highest scores, without bias and groups.
        """
        if not self.experts.document_loss and not self.experts.step_loss:
            return
        scores = logits.sigmoid() if self.experts.score == "sigmoid" else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        best = best_of(scores.detach(), self.experts.chosen)
        frequencies = best.double().mean(0) * self.experts.count / self.experts.chosen
        self.document_losses.append(len(scores) * (frequencies * scores.mean(0)).sum())
        self.score_sums.append(scores.sum(0))
        self.best_counts = self.best_counts + best.sum(0)

    def balance_losses(self, num_tokens: int) -> torch.Tensor:
        """Return the weighted balancing losses of a step, a scalar."""
        of_documents = torch.stack(self.document_losses).sum() / num_tokens
        total = self.last_counts.sum()
        shares = self.last_counts / total if total else torch.full_like(self.last_counts, 1 / self.experts.count)
        of_step = self.experts.count * (shares * torch.stack(self.score_sums).sum(0) / num_tokens).sum()
        return self.experts.document_loss * of_documents + self.experts.step_loss * of_step

    def shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the weight of each expert for each token, [n, experts]; 0 for experts that are not chosen."""
        score = self.experts.score
        scores = {"before": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid, "after": lambda: logits}[score]()
        is_chosen = self.choice(scores.detach() + self.bias)
        if score == "after":
            return logits.masked_fill(~is_chosen, -torch.inf).softmax(-1) * self.experts.scaling
        chosen = scores * is_chosen
        if score == "sigmoid" and self.experts.chosen > 1:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.experts.scaling

    def choice(self, scores: torch.Tensor) -> torch.Tensor:
        """Return whether a token chooses an expert by scores [n, experts]: bool [n, experts]."""
        if self.experts.groups is not None:
            count, wanted = self.experts.groups
            best = scores.unflatten(-1, (count, -1)).topk(self.experts.chosen // wanted, -1).values.sum(-1)
            is_open = best_of(best, wanted).repeat_interleave(self.experts.count // count, -1)
            scores = scores.masked_fill(~is_open, -torch.inf)
        return best_of(scores, self.experts.chosen)

    def end_step(self) -> None:
        """Move the bias of each expert towards equal loads, and begin a new step."""
        if self.experts.bias_rate is not None:
            self.bias = self.bias + self.experts.bias_rate * (self.counts.mean() - self.counts).sign()
        self.last_counts, self.best_counts = self.best_counts, torch.zeros_like(self.counts)
        self.counts = torch.zeros_like(self.counts)
        self.document_losses, self.score_sums, self.z_losses = [], [], []


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return whether each of scores [n, m] is one of the ``count`` highest of its row, bool [n, m].

    Raises AssertionError if rounding could change the choice.
    """
    ordered = scores.sort(-1, descending=True).values
    if len(scores) and count < scores.shape[-1]:
        gap = float((ordered[:, count - 1] - ordered[:, count]).min())
        assert gap > MARGIN, f"rounding may change the choice of experts ({gap=}): take another seed of the documents"
    return scores >= ordered[:, count - 1 : count]
