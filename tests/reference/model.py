"""A GPT model in plain PyTorch, which computes one document at a time and imports nothing of the project.

Parameters have the names and the order of rows that checkpoints have, because runs save gradients by them. Formulas are
from the papers that the settings name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tests.reference.experts import Router, expert_shapes
from tests.reference.positions import rotate, temperature
from tests.reference.settings import HEADS, HIDDEN, ROWS, Clip, Settings

EPSILON = 1e-5
Weights = dict[str, torch.Tensor]
Shape = tuple[int, ...]
Document = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens [n], the token after each of the first m of them [m], and whether it has a loss, bool [m]."""


def drawn(name: str, shape: Sequence[int], scale: float) -> torch.Tensor:
    """Return the first values of a parameter, [*shape]: noise from a hash of its name, around 1 for a norm's weight."""
    noise = scale * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return noise + 1 if name.endswith("norm.weight") else noise


def shapes(model: Settings) -> dict[str, Shape]:
    """Return the shape of each parameter."""
    found: dict[str, Shape] = {"embedding.word_embeddings.weight": (ROWS, HIDDEN)}
    if model.positions.kind == "learned":
        found["embedding.position_embeddings.weight"] = (model.length, HIDDEN)
    for layer in range(model.layers):
        found |= layer_shapes(model, f"decoder.layers.{layer}.", layer)
    found |= norm_shapes(model, "decoder.final_layernorm")
    for depth in range(model.depths):
        prefix = f"mtp.layers.{depth}."
        for name in ("enorm", "hnorm", "final_layernorm"):
            found |= norm_shapes(model, prefix + name)
        found[prefix + "eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        found |= layer_shapes(model, prefix + "mtp_model_layer.", model.layers - 1)
    if not model.is_tied:
        found["output_layer.weight"] = (ROWS, HIDDEN)
    return found


def norm_shapes(model: Settings, name: str, size: int = HIDDEN) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{name}.weight": (size,)}
    return found | {f"{name}.bias": (size,)} if model.norm == "layer" else found


def linear_shapes(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    found = {f"{name}.weight": shape}
    return found | {f"{name}.bias": shape[:1]} if has_bias else found


def layer_shapes(model: Settings, prefix: str, layer: int) -> dict[str, Shape]:
    """Return the shapes of one layer's parameters, whose names begin with ``prefix``."""
    found = norm_shapes(model, prefix + "input_layernorm") | norm_shapes(model, prefix + "pre_mlp_layernorm")
    attention = prefix + "self_attention."
    found |= latent_shapes(model, attention) if model.latent else attention_shapes(model, attention)
    if model.experts is not None and layer in model.experts.layers:
        return found | expert_shapes(model.experts, prefix + "mlp.")
    return found | mlp_shapes(model, prefix + "mlp.", model.width)


def mlp_shapes(model: Settings, prefix: str, width: int) -> dict[str, Shape]:
    inner = 2 * width if model.activation == "swiglu" else width
    first = linear_shapes(prefix + "linear_fc1", (inner, HIDDEN), model.has_biases)
    return first | linear_shapes(prefix + "linear_fc2", (HIDDEN, width), model.has_biases)


def attention_shapes(model: Settings, prefix: str) -> dict[str, Shape]:
    size = model.head_size
    rows = (HEADS + 2 * model.key_heads) * size
    found = linear_shapes(prefix + "linear_qkv", (rows, HIDDEN), model.has_biases or model.has_qkv_bias)
    found |= linear_shapes(prefix + "linear_proj", (HIDDEN, HEADS * size), model.has_biases)
    if model.has_qk_norm:
        found |= norm_shapes(model, prefix + "q_layernorm", size) | norm_shapes(model, prefix + "k_layernorm", size)
    if model.sink == "learned":
        found[prefix + "core_attention.softmax_offset"] = (HEADS,)
    return found


def latent_shapes(model: Settings, prefix: str) -> dict[str, Shape]:
    latent = model.latent
    assert latent is not None
    queries = HEADS * (latent.plain + latent.rotated)
    found: dict[str, Shape] = {
        prefix + "linear_kv_down_proj.weight": (latent.rank + latent.rotated, HIDDEN),
        prefix + "linear_kv_up_proj.weight": (HEADS * (latent.plain + latent.value), latent.rank),
        prefix + "linear_proj.weight": (HIDDEN, HEADS * latent.value),
    }
    if model.has_qk_norm:
        found |= norm_shapes(model, prefix + "kv_layernorm", latent.rank)
    if latent.query_rank is None:
        return found | {prefix + "linear_q_proj.weight": (queries, HIDDEN)}
    if model.has_qk_norm:
        found |= norm_shapes(model, prefix + "q_layernorm", latent.query_rank)
    found[prefix + "linear_q_down_proj.weight"] = (latent.query_rank, HIDDEN)
    found[prefix + "linear_q_up_proj.weight"] = (queries, latent.query_rank)
    return found


class Model:
    """The model with its weights.

    Attributes:
        weights: parameters by name, in float64.
        routers: router of each layer with experts, by the prefix of the layer's names.
        largest: largest score of each head in this step [heads], by the prefix of the attention's names.
    """

    def __init__(self, settings: Settings, scale: float) -> None:
        self.settings = settings
        self.weights: Weights = {
            name: drawn(name, shape, scale).double().requires_grad_() for name, shape in shapes(settings).items()
        }
        names = [name for name in self.weights if name.endswith("router.weight")]
        self.largest: Weights = {}
        self.routers = {name.removesuffix("router.weight"): Router(settings.experts) for name in names}

    def document(self, document: Document) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two sums of losses, scalars: of the document's labels, and of all depths of multi-token prediction."""
        tokens, labels, has_loss = document
        states = self.embedded(tokens, 0)
        for layer in range(self.settings.layers):
            states = self.layer(f"decoder.layers.{layer}.", layer, states)
        states = self.norm("decoder.final_layernorm", states)
        return self.cross_entropy(states, labels, has_loss), self.later_losses(states, labels, has_loss)

    def embedded(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        """Return the inputs of tokens at positions ``first``, ``first + 1``, ..., [n, h]."""
        found = self.weights["embedding.word_embeddings.weight"][tokens]
        if self.settings.positions.kind != "learned":
            return found
        return found + self.weights["embedding.position_embeddings.weight"][first : first + len(tokens)]

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor, has_loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross entropies of labels [m] with a loss by the first m of states [n, h], a scalar."""
        name = "embedding.word_embeddings.weight" if self.settings.is_tied else "output_layer.weight"
        logits = states[: len(labels)] @ self.weights[name].T
        return F.cross_entropy(logits[has_loss], labels[has_loss], reduction="sum")

    def later_losses(self, states: torch.Tensor, labels: torch.Tensor, has_loss: torch.Tensor) -> torch.Tensor:
        """Return the weighted losses of all depths, a scalar. Each depth's mean counts as much as the labels' mean."""
        total = states.new_zeros(())
        for depth in range(self.settings.depths):
            # The last states read token 0 in place of a later token, as in Megatron. Attention is causal, so no other
            # state depends on them, but experts count them.
            targets, wanted, read = labels[depth + 1 :], has_loss[depth + 1 :], labels[depth:]
            states = self.later_states(depth, states, F.pad(read, (0, len(states) - len(read))))
            share = int(has_loss.sum()) / max(int(wanted.sum()), 1)
            weight = self.settings.depth_weight / self.settings.depths * share
            total = total + weight * self.cross_entropy(states, targets, wanted)
        return total

    def later_states(self, depth: int, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states of a depth, [n, h], of the states [n, h] before it and the tokens [n] that it reads."""
        prefix = f"mtp.layers.{depth}."
        read = self.norm(prefix + "enorm", self.embedded(tokens, depth + 1))
        both = torch.cat((read, self.norm(prefix + "hnorm", states)), -1)
        states = self.layer(
            prefix + "mtp_model_layer.", self.settings.layers - 1, self.linear(prefix + "eh_proj", both)
        )
        return self.norm(prefix + "final_layernorm", states)

    def layer(self, prefix: str, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Return the states [n, h] after a layer."""
        normed = self.norm(prefix + "input_layernorm", states)
        attention = self.latent_attention if self.settings.latent else self.attention
        states = states + attention(prefix + "self_attention.", layer, normed)
        normed, mlp = self.norm(prefix + "pre_mlp_layernorm", states), prefix + "mlp."
        if mlp in self.routers:
            return states + self.routers[mlp](self.weights, mlp, normed)
        return states + self.mlp(mlp, normed)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm or LayerNorm of ``x`` [..., size]; ``x`` itself if there is no such norm."""
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return x
        if self.settings.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
        return x + self.weights[f"{name}.bias"] if self.settings.norm == "layer" else x

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a linear layer's result for ``x`` [n, in]: [n, out]."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the layer's two linear layers for ``x`` [n, h]: [n, h]."""
        inner = self.linear(prefix + "linear_fc1", x)
        if self.settings.activation == "swiglu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        elif self.settings.activation == "gelu":
            inner = F.gelu(inner)
        else:
            inner = inner.relu().square()
        return self.linear(prefix + "linear_fc2", inner)

    def attention(self, prefix: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return attention with groups of queries for ``x`` [n, h]: [n, h]."""
        size, groups = self.settings.head_size, self.settings.key_heads
        of_group = HEADS // groups
        mixed = self.linear(prefix + "linear_qkv", x).unflatten(-1, (groups, of_group + 2, size))
        queries, keys, values = mixed.split((of_group, 1, 1), 2)
        queries = self.norm(prefix + "q_layernorm", queries.flatten(1, 2))
        keys = self.norm(prefix + "k_layernorm", keys[:, :, 0])
        positions = self.settings.positions
        if positions.kind == "rotary" and layer not in positions.without:
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        keys, values = (one.repeat_interleave(of_group, 1) for one in (keys, values[:, :, 0]))
        mixed = self.attended(prefix, layer, queries * size**-0.5, keys, values)
        return self.linear(prefix + "linear_proj", mixed)

    def latent_attention(self, prefix: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return multi-head latent attention for ``x`` [n, h]: [n, h]."""
        latent, positions = self.settings.latent, self.settings.positions
        assert latent is not None
        if latent.query_rank is None:
            queries = self.linear(prefix + "linear_q_proj", x)
        else:
            of_query = self.norm(prefix + "q_layernorm", self.linear(prefix + "linear_q_down_proj", x))
            queries = self.linear(prefix + "linear_q_up_proj", of_query)
        plain, rotated = queries.unflatten(-1, (HEADS, -1)).split((latent.plain, latent.rotated), -1)
        low, shared = self.linear(prefix + "linear_kv_down_proj", x).split((latent.rank, latent.rotated), -1)
        low = self.norm(prefix + "kv_layernorm", low)
        high = self.linear(prefix + "linear_kv_up_proj", low).unflatten(-1, (HEADS, -1))
        keys, values = high.split((latent.plain, latent.value), -1)
        shared = rotate(shared[:, None], positions).expand(-1, HEADS, -1)
        scale = (latent.plain + latent.rotated) ** -0.5
        if positions.yarn is not None and positions.yarn.scale_all is not None:
            scale *= temperature(positions.yarn.factor, positions.yarn.scale_all) ** 2
        queries = torch.cat((plain, rotate(rotated, positions)), -1) * scale
        return self.linear(
            prefix + "linear_proj", self.attended(prefix, layer, queries, torch.cat((keys, shared), -1), values)
        )

    def attended(
        self, prefix: str, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention of queries and keys [n, heads, size] to values [n, heads, v]: [n, heads * v]."""
        scores = torch.einsum("qhd,khd->hqk", queries, keys)
        before = torch.arange(len(keys))[:, None] - torch.arange(len(keys))
        window = self.settings.windows[layer]
        is_hidden = (before < 0) | (before > (math.inf if window is None else window))
        scores = scores.masked_fill(is_hidden, -math.inf)
        found = scores.detach().amax((1, 2))
        self.largest[prefix] = torch.maximum(self.largest.get(prefix, found), found)
        if self.settings.sink != "none":
            sink = self.weights.get(prefix + "core_attention.softmax_offset", scores.new_zeros(HEADS))
            scores = torch.cat((scores, sink[:, None, None].expand(-1, len(keys), 1)), -1)
        shares = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)

    @torch.no_grad()
    def clip(self) -> int:
        """Scale queries and keys of heads with too large scores, and return the number of such heads.

        Heads that share a key are scaled together. Layers of multi-token prediction are not clipped.
        """
        clip, largest, clipped = self.settings.clip, self.largest, 0
        self.largest = {}
        if clip is None:
            return 0
        for prefix, found in largest.items():
            if not prefix.startswith("decoder."):
                continue
            clipped += int((found > clip.threshold).sum())
            if self.settings.latent is not None:
                self.clip_latent(prefix, clip, found)
                continue
            size, groups = self.settings.head_size, self.settings.key_heads
            rows = self.weights[prefix + "linear_qkv.weight"].view(groups, -1, size, HIDDEN)  # heads of a group
            for group, top in enumerate(found.view(groups, -1).amax(1).tolist()):
                eta = min(1.0, clip.threshold / top) if top > 0 else 1.0
                rows[group, :-2] *= eta**clip.alpha
                rows[group, -2] *= eta ** (1 - clip.alpha)
        return clipped

    def clip_latent(self, prefix: str, clip: Clip, found: torch.Tensor) -> None:
        """Scale queries and keys of latent attention; ``found`` [heads]."""
        latent = self.settings.latent
        assert latent is not None
        name = "linear_q_proj" if latent.query_rank is None else "linear_q_up_proj"
        queries = self.weights[f"{prefix}{name}.weight"].unflatten(0, (HEADS, -1))
        keys = self.weights[prefix + "linear_kv_up_proj.weight"].unflatten(0, (HEADS, -1))
        for head, top in enumerate(found.tolist()):
            eta = min(1.0, clip.threshold / top) if top > 0 else 1.0
            queries[head, : latent.plain] *= eta**clip.alpha
            queries[head, latent.plain :] *= eta
            keys[head, : latent.plain] *= eta ** (1 - clip.alpha)
