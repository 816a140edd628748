"""Forward passes of a model and its draft heads over several texts, with their rows one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from bytescale_ext.decode.sampler import Place, Sampler
from bytescale_ext.decode.tree import TokenTree, TreeShape, grow_trees
from bytescale_ext.parallel.upload import upload
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
from megatron.bytescale.core.models.gpt.draft_heads import embed_by_output
from megatron.bytescale.inference.cache import DecodeParams, KeyValueCache, NewTokens

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads

SLICE_TOKENS = 2048


@dataclass
class Text:
    """One text in decoding.

    Attributes:
        number: number of the prompt.
        prompt: token ids of the prompt.
        cache: the model's keys and values of all accepted tokens except the last.
        draft_cache: the same for the layers of the heads.
        last: last accepted token, which the model has not read yet.
        state: state that the next tree grows from, [h].
    """

    number: int
    prompt: Sequence[int]
    cache: KeyValueCache
    draft_cache: KeyValueCache
    last: int = -1
    state: torch.Tensor | None = None

    @classmethod
    def of(cls, number: int, prompt: Sequence[int], rows: int) -> Text:
        """Return the text of a prompt, with caches of ``rows`` rows."""
        return cls(number, prompt, KeyValueCache(rows), KeyValueCache(rows))


class Piece(NamedTuple):
    """Rows of one text in a forward pass: tokens, positions, and visible rows of each row (None: earlier rows)."""

    text: Text
    tokens: Sequence[int]
    positions: Sequence[int]
    visible: torch.Tensor | None = None


class Passes:
    """The forward passes. Each is collective on the tensor-parallel group, and all its ranks have the same texts.

    Attributes:
        model: Megatron's GPTModel.
        heads: draft heads of the model; None: no trees.
        choose: sampler of the model's tokens.
    """

    def __init__(self, model: GPTModel, heads: DraftHeads | None, choose: Sampler) -> None:
        self.model, self.heads, self.choose = model, heads, choose
        self.device = next(model.parameters()).device
        self.weight = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )

    def prefill(self, texts: Sequence[Text]) -> list[list[int]]:
        """Run the prompts in slices of ``SLICE_TOKENS`` tokens in total; return the first token after each prompt."""
        while pieces := next_pieces(texts):
            hidden, output = self._run(pieces)
            for text, tokens, *_ in pieces:
                text.cache.keep(range(len(tokens)))
            ends = [piece.text.cache.length == len(piece.text.prompt) for piece in pieces]
            lasts = [part[-1:] for part, is_end in zip(output, ends, strict=True) if is_end]
            places = [
                Place(text.number, len(text.prompt)) for (text, *_), is_end in zip(pieces, ends, strict=True) if is_end
            ]
            first = iter(self.choose(self._logits(torch.cat(lasts)), places) if lasts else [])
            following = []
            for piece, is_end in zip(pieces, ends, strict=True):
                start, stop = piece.positions[0], piece.positions[-1]
                known = list(piece.text.prompt[start + 1 : stop + 2])
                piece.text.last = next(first) if is_end else -1
                following.append([*known, piece.text.last] if is_end else known)
            self._draft_states([piece.text for piece in pieces], hidden, following)
        return [[text.last] for text in texts]

    def draft(self, texts: Sequence[Text], depths: Sequence[int], shape: TreeShape) -> list[TokenTree]:
        """Return a tree of guesses below the last token of each text, with the maximum depths ``depths``."""
        heads = self.heads
        assert heads is not None, "there are no draft heads"
        states = torch.stack([text.state for text in texts if text.state is not None])

        def guess(head: int, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embedded = None if head == 0 else self._embed(tokens.tolist())
            states, guesses = heads.head(head, states[:, None], embedded)
            return states[:, 0], self._logits(guesses[:, 0]).float().log_softmax(-1)

        return grow_trees([text.last for text in texts], states, depths, guess, shape)

    def check(self, texts: Sequence[Text], trees: Sequence[TokenTree]) -> list[list[int]]:
        """Run the model on each text's tree; return its newly accepted tokens: accepted guesses, and one more token."""
        pieces = []
        for text, tree in zip(texts, trees, strict=True):
            positions = [text.cache.length + depth for depth in tree.depths]
            pieces.append(Piece(text, tree.tokens, positions, upload(tree.visible(), self.device)))
        hidden, output = self._run(pieces)
        places = [Place(piece.text.number, position + 1) for piece in pieces for position in piece.positions]
        chosen, start, accepted, kept = self.choose(self._logits(torch.cat(output)), places), 0, [], []
        for text, tree, states in zip(texts, trees, hidden, strict=True):
            of_text = chosen[start : start + len(tree.tokens)]
            start += len(tree.tokens)
            path = tree.accepted_path(of_text)
            text.cache.keep(path)
            text.last = of_text[path[-1]]
            accepted.append([*(tree.tokens[node] for node in path[1:]), text.last])
            kept.append(states[path])
        self._draft_states(texts, kept, accepted)
        return accepted

    def _run(self, pieces: Sequence[Piece]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the states of each piece before and after the last norm, each [t, h]."""
        before: list[torch.Tensor] = []
        norm = self.model.decoder.final_layernorm
        hook = norm.register_forward_pre_hook(lambda norm, inputs: before.append(inputs[0]))
        counts = [len(piece.tokens) for piece in pieces]
        parts = [NewTokens(piece.text.cache, len(piece.tokens), piece.visible) for piece in pieces]
        places = self._on_device([place for piece in pieces for place in piece.positions])
        ids = self._on_device([token for piece in pieces for token in piece.tokens])
        try:
            after = self.model(
                ids[None], places[None], None, packed_seq_params=DecodeParams(positions=places, parts=parts),
                output_processor=lambda *, hidden_states, **unused: hidden_states,
            )  # fmt: skip
        finally:
            hook.remove()
        return before[0][:, 0].split(counts), after[:, 0].split(counts)

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, v] of states [n, h] after the last norm, equal on all ranks."""
        layer = self.model.output_layer
        logits: torch.Tensor = layer(output[:, None], weight=self.weight, runtime_gather_output=True)[0]
        return logits[:, 0]

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embed tokens with the output layer's weight: [n, 1, h]."""
        ids = self._on_device(tokens)[None]
        return embed_by_output(ids, self.weight, self.model.output_layer.tp_group, scatter=False)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return integers as int64 [n] on the device, without a wait of the host."""
        return upload(torch.tensor(numbers, dtype=torch.int64), self.device)

    def _draft_states(
        self, texts: Sequence[Text], hidden: Sequence[torch.Tensor], following: Sequence[Sequence[int]]
    ) -> None:
        """Run the heads' layers on accepted tokens of each text, given their states [t, h] and the token after each."""
        if self.heads is None:
            return
        counts = [len(tokens) for tokens in following]
        caches = [text.draft_cache for text in texts]
        places = [cache.length + row for cache, count in zip(caches, counts, strict=True) for row in range(count)]
        positions = self._on_device(places)
        rotary = getattr(self.model, "rotary_pos_emb", None)
        states = self.heads.states(
            torch.cat(list(hidden))[:, None],
            self._embed([token for tokens in following for token in tokens]),
            rotary_pos_emb=None if rotary is None else document_angles(rotary, positions),
            packed_seq_params=DecodeParams(positions=positions, parts=list(map(NewTokens, caches, counts))),
        )
        for text, of_text in zip(texts, states[:, 0].split(counts), strict=True):
            text.draft_cache.keep(range(len(of_text)))
            text.state = of_text[-1]


def next_pieces(texts: Sequence[Text]) -> list[Piece]:
    """Return the next pieces of the texts' prompts, at most ``SLICE_TOKENS`` tokens in total; empty at the end."""
    pieces, room = [], SLICE_TOKENS
    for text in texts:
        start = text.cache.length
        tokens = text.prompt[start : start + room]
        if tokens:
            pieces.append(Piece(text, tokens, range(start, start + len(tokens))))
            room -= len(tokens)
        if not room:
            break
    return pieces
