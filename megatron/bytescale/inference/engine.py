"""Decode one sequence: prefill in slices, guess a tree, check it in one forward pass, keep what the model accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bytescale_ext.decode.choose import Chooser
from bytescale_ext.decode.tree import TokenTree, TreeShape, grow_tree
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
from megatron.bytescale.core.models.gpt.draft_heads import embed_by_output
from megatron.bytescale.inference.cache import DecodeParams, KeyValueCache

SLICE_TOKENS = 2048


@dataclass
class Generation:
    """What was generated.

    Attributes:
        tokens: without the prompt.
        target_forwards: forward passes of the model after the prompt.
        accepted: guesses that each of them accepted.
    """

    tokens: list[int] = field(default_factory=list)
    target_forwards: int = 0
    accepted: list[int] = field(default_factory=list)

    def __add__(self, other: Generation) -> Generation:
        """Return both together."""
        return Generation(
            self.tokens + other.tokens,
            self.target_forwards + other.target_forwards,
            self.accepted + other.accepted,
        )

    def line(self, seconds: float) -> str:
        """Return the figures in words; ``seconds``: with those of the prompts."""
        each = sum(self.accepted) / max(1, self.target_forwards)
        return (
            f"{len(self.tokens)} tokens in {self.target_forwards} forward passes after the prompt, {each:.3f} guesses "
            f"accepted each, {len(self.tokens) / seconds:.1f} tokens/s"
        )


@dataclass(frozen=True)
class Request:
    """How a text is to be continued.

    Attributes:
        max_tokens: the most new tokens, at least one.
        choose: chooses the model's tokens.
        shape: of the trees of guesses; None: token by token.
        end: token after which the text ends; None: none.
    """

    max_tokens: int
    choose: Chooser
    shape: TreeShape | None = None
    end: int | None = None


@dataclass(frozen=True)
class Decoder:
    """A model ready to decode.

    Attributes:
        model: Megatron's GPTModel, with draft heads or without.
        heads: its heads; None: it decodes token by token.
        context: the most tokens of prompt and output together.
    """

    model: Any
    heads: Any
    context: int

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], request: Request, emit: Callable[[list[int]], None] = lambda tokens: None
    ) -> Generation:
        """Generate tokens after a prompt.

        Args:
            prompt: at least one token.
            request: how many, and how.
            emit: is given new tokens as soon as they are certain.

        Raises:
            ValueError: the prompt is empty, or prompt and output exceed the context.
        """
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) + request.max_tokens > self.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-tokens {request.max_tokens} exceed the context of "
                f"{self.context} tokens"
            )
        shape, heads = request.shape, None if request.shape is None else self.heads
        rows = len(prompt) + request.max_tokens + (0 if shape is None else shape.num_tokens)
        run = _Sequence(self.model, heads, rows)
        done = Generation()
        new = run.prefill(prompt, request.choose)
        while not self._take(done, new, request, emit):
            depth = request.max_tokens - len(done.tokens) - 1
            tree = TokenTree((done.tokens[-1],), (-1,))
            if heads is not None and shape is not None and depth:
                tree = run.draft(done.tokens[-1], min(depth, heads.settings.num_heads), shape)
            new = run.check(tree, request.choose)
            done.target_forwards += 1
            done.accepted.append(len(new) - 1)
        return done

    def _take(self, done: Generation, new: list[int], request: Request, emit: Callable[[list[int]], None]) -> bool:
        """Add new tokens up to the end of the text; return whether it is there."""
        if request.end in new:
            new = new[: new.index(request.end) + 1]
        done.tokens += new
        emit(new)
        return len(done.tokens) >= request.max_tokens or done.tokens[-1] == request.end


class _Sequence:
    """The caches of one sequence, and the state from which the next tree grows."""

    def __init__(self, model: Any, heads: Any, rows: int) -> None:
        self.model, self.heads = model, heads
        self.cache, self.draft_cache = KeyValueCache(rows), KeyValueCache(rows)
        self.state: torch.Tensor | None = None
        self.device = next(model.parameters()).device
        self.weight = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )

    def prefill(self, prompt: Sequence[int], choose: Chooser) -> list[int]:
        """Run the prompt in slices; return the first token after it."""
        first: list[int] = []
        for start in range(0, len(prompt), SLICE_TOKENS):
            part = list(prompt[start : start + SLICE_TOKENS])
            hidden, output = self._run(part, range(start, start + len(part)), None)
            self.cache.keep(range(len(part)))
            following = list(prompt[start + 1 : start + 1 + len(part)])
            if len(following) < len(part):
                first = choose(self._logits(output[-1:]))
            self._draft_states(hidden, [*following, *first])
        return first

    def draft(self, root: int, depth: int, shape: TreeShape) -> TokenTree:
        """Return a tree below the last certain token."""
        assert self.state is not None

        def guess(head: int, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embedded = None if head == 0 else self._embed(tokens.tolist())
            states, guesses = self.heads.head(head, states[:, None], embedded)
            return states[:, 0], self._logits(guesses[:, 0]).float().log_softmax(-1)

        return grow_tree(root, self.state, depth, guess, shape)

    def check(self, tree: TokenTree, choose: Chooser) -> list[int]:
        """Run the model on a tree; return the new certain tokens: accepted guesses, and one more."""
        length = self.cache.length
        hidden, output = self._run(tree.tokens, [length + depth for depth in tree.depths], tree.visible())
        chosen = choose(self._logits(output))
        path = tree.walk(chosen)
        self.cache.keep(path)
        new = [*(tree.tokens[node] for node in path[1:]), chosen[path[-1]]]
        self._draft_states(hidden[path], new)
        return new

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of new tokens before and after the last norm, both [t, h]."""
        before: list[torch.Tensor] = []
        norm = self.model.decoder.final_layernorm
        hook = norm.register_forward_pre_hook(lambda norm, inputs: before.append(inputs[0]))
        places = torch.tensor(positions, device=self.device)
        params = DecodeParams(positions=places, cache=self.cache, visible=visible)
        ids = torch.tensor(tokens, device=self.device)
        try:
            after = self.model(
                ids[None], places[None], None, packed_seq_params=params,
                output_processor=lambda *, hidden_states, **unused: hidden_states,
            )  # fmt: skip
        finally:
            hook.remove()
        return before[0][:, 0], after[:, 0]

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, v] of states [n, h] after the last norm."""
        logits: torch.Tensor = self.model.output_layer(output[:, None], weight=self.weight)[0]
        return logits[:, 0]

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the embeddings [n, 1, h] by the output layer."""
        ids = torch.tensor(tokens, device=self.device)[None]
        return embed_by_output(ids, self.weight, self.model.output_layer.tp_group, scatter=False)

    def _draft_states(self, hidden: torch.Tensor, following: Sequence[int]) -> None:
        """Run the layers of the heads on certain tokens: states [t, h], and the token after each."""
        if self.heads is None:
            return
        start = self.draft_cache.length
        places = torch.arange(start, start + len(following), device=self.device)
        rotary = getattr(self.model, "rotary_pos_emb", None)
        states = self.heads.states(
            hidden[:, None],
            self._embed(following),
            rotary_pos_emb=None if rotary is None else document_angles(rotary, places),
            packed_seq_params=DecodeParams(positions=places, cache=self.draft_cache),
        )
        self.draft_cache.keep(range(len(following)))
        self.state = states[-1]
