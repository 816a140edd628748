"""A small model of bytes in plain PyTorch: its training on windows, its losses on other windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD, BYTE_LEVEL_VOCAB_SIZE

IGNORED: Final = -100
_KERNEL: Final = 4  # bytes that a key sees beside its own, so that few steps teach a model to look texts up
_FACTORS: Final = (1 << 9, 1 << 18, 1 << 27)
_MIX: Final = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Width, layers, heads and rows of a table; the default has 1.5 million parameters, most of them in tables."""

    width: int = 96
    layers: int = 2
    heads: int = 2
    rows: int = 4096


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tokens of a step, learning rate of the matrices, and the share of it at the end."""

    step_tokens: int = 4096
    rate: float = 0.02
    last: float = 0.1


class Layer(nn.Module):
    """Causal attention behind a short causal convolution (arXiv 2109.08668), and an MLP of squared ReLU."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Parameter(torch.zeros(_KERNEL, width))
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)
        nn.init.constant_(self.mix[-1:], 1.0)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the next hidden states, as ``x``: [batch, tokens, width]. ``turn``: cosines and sines [tokens, n]."""
        batch, tokens, width = x.shape
        before = F.pad(F.rms_norm(x, (width,)).bfloat16(), (0, 0, _KERNEL - 1, 0))
        mix = self.mix.bfloat16()
        mixed = sum(before[:, place : place + tokens] * mix[place] for place in range(_KERNEL))
        q, k, v = self.qkv(mixed).view(batch, tokens, 3, self.heads, width // self.heads).transpose(1, 3).unbind(2)
        size = (width // self.heads,)
        mixed = F.scaled_dot_product_attention(
            _turned(F.rms_norm(q, size), turn), _turned(F.rms_norm(k, size), turn), v, is_causal=True, scale=0.3
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (width,)))).square())


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the first half of each head by its position: the other half finds texts at any distance."""
    cos, sin = turn
    one, other, rest = x.split([cos.shape[1], cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos, rest], dim=-1)


class ByteModel(nn.Module):
    """A GPT of bytes with rotary positions. Tables of hashed runs of 2 to 4 bytes add to its embedding.

    They take few operations for their parameters, so that a core sees enough text, and name what was read before.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.turned = size.width // size.heads // 4
        self.embed = nn.Embedding(BYTE_LEVEL_VOCAB_SIZE, size.width)
        self.runs = nn.ModuleList(nn.Embedding(size.rows, size.width) for _ in _FACTORS)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, BYTE_LEVEL_VOCAB_SIZE, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [batch, tokens, vocabulary], of ``tokens`` [batch, tokens]."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            places = torch.arange(tokens.shape[1], dtype=torch.float32)
            angles = places[:, None] * 10000.0 ** (-torch.arange(self.turned, dtype=torch.float32) / self.turned)
            x, run = self.embed(tokens), tokens
            for back, (factor, table) in enumerate(zip(_FACTORS, self.runs, strict=True), start=1):
                run = run + factor * F.pad(tokens, (back, 0))[:, : tokens.shape[1]]
                x = x + table((run * _MIX >> 20) % table.num_embeddings)
            x = F.rms_norm(x, (self.embed.embedding_dim,))
            for layer in self.layers:
                x = layer(x, (angles.cos().bfloat16(), angles.sin().bfloat16()))
            return self.head(F.rms_norm(x, (self.embed.embedding_dim,))).float()


def batch_of(windows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels [windows, tokens] of windows of tokens [n] each; what pads has no label."""
    longest = max(map(len, windows))
    tokens = torch.full((len(windows), longest), BYTE_LEVEL_EOD, dtype=torch.long)
    labels = torch.full((len(windows), longest), IGNORED, dtype=torch.long)
    for row, window in enumerate(windows):
        values = torch.from_numpy(window.astype(np.int64))
        tokens[row, : len(window)] = values
        labels[row, : len(window) - 1] = values[1:]
    return tokens, labels


def batches_of(windows: Sequence[np.ndarray], tokens: int) -> list[Sequence[np.ndarray]]:
    """Return windows of tokens [n] each, in their order, in steps of about ``tokens``.

    The number of steps follows from all tokens alone, so that full and less full windows take equally many.
    """
    steps = min(max(round(sum(map(len, windows)) / tokens), 1), len(windows))
    bounds = [step * len(windows) // steps for step in range(steps + 1)]
    return [windows[begin:end] for begin, end in pairwise(bounds)]


def train(model: ByteModel, windows: Sequence[np.ndarray], schedule: Schedule) -> list[float]:
    """Train on windows of tokens [n] each, once and in this order; return the loss of each step."""
    matrices = [one for layer in model.layers for name, one in layer.named_parameters() if "mix" not in name]
    others = [one for name, one in model.named_parameters() if "layers" not in name or "mix" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=schedule.rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=schedule.rate / 3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [group["lr"] for one in optimizers for group in one.param_groups]
    batches = batches_of(windows, schedule.step_tokens)
    losses = []
    model.train()
    for step, batch in enumerate(batches):
        done = step / len(batches)
        factor = min(1.0, 20 * (step + 1) / len(batches)) * (1 - (1 - schedule.last) * done)
        for group, rate in zip((g for one in optimizers for g in one.param_groups), rates, strict=True):
            group["lr"] = rate * factor
        tokens, labels = batch_of(batch)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for one in optimizers:
            one.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def token_losses(model: ByteModel, windows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the loss of each token but the first, float32 [n - 1], and whether the model's first choice was right."""
    model.eval()
    found = []
    for start in range(0, len(windows), 4):
        batch = windows[start : start + 4]
        tokens, labels = batch_of(batch)
        logits = model(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        right = logits.argmax(dim=-1) == labels
        for row, window in enumerate(batch):
            size = len(window) - 1
            found.append((losses.view(labels.shape)[row, :size].numpy(), right[row, :size].numpy()))
    return found


def losses_by_position(model: ByteModel, windows: Sequence[np.ndarray], context: int, parts: int) -> list[float]:
    """Return the mean loss in each of ``parts`` equal parts of windows of up to ``context`` tokens [n] each."""
    sums, counts = np.zeros(parts), np.zeros(parts)
    for losses, _ in token_losses(model, windows):
        place = np.arange(1, len(losses) + 1) * parts // context
        sums += np.bincount(place, weights=losses, minlength=parts)[:parts]
        counts += np.bincount(place, minlength=parts)[:parts]
    return [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]
