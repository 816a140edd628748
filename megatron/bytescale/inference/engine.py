"""Decodes texts: prefill in slices, draft a tree of guesses, check it in one forward pass, keep accepted guesses.

Several texts are decoded together. Their rows follow one another in each forward pass, without padding. Each text has
its own caches and accepts guesses independently of the others. When a text ends, the next text takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bytescale_ext.decode.sampler import Sampler
from bytescale_ext.decode.tree import TokenTree, TreeShape
from megatron.bytescale.inference.passes import Passes, Text

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads


@dataclass
class Generation:
    """The generated tokens of one text, and statistics.

    Attributes:
        tokens: generated tokens, without the prompt.
        target_forwards: number of forward passes of the model after the prompt.
        accepted: number of accepted guesses in each of these passes.
        seconds: time from the prompt to the end, in seconds.
    """

    tokens: list[int] = field(default_factory=list)
    target_forwards: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float | list[int]]:
        """Return the statistics for a line of JSON."""
        return {
            "tokens": self.tokens,
            "target_forwards": self.target_forwards,
            "accepted": self.accepted,
            "tokens_per_second": len(self.tokens) / self.seconds,
        }


def described(texts: Sequence[Generation], seconds: float, *, has_heads: bool) -> str:
    """Return the statistics of texts in words.

    Args:
        texts: finished texts.
        seconds: wall time of all texts together.
        has_heads: whether draft heads guessed tokens.
    """
    num_tokens, passes = sum(len(text.tokens) for text in texts), sum(text.target_forwards for text in texts)
    accepted = sum(sum(text.accepted) for text in texts)
    guesses = f", {accepted / max(1, passes):.3f} guesses accepted each" if has_heads else ""
    return (
        f"{num_tokens} tokens in {passes} forward passes after the prompt{guesses}, {num_tokens / seconds:.1f} tokens/s"
    )


@dataclass(frozen=True)
class GenerationRequest:
    """The settings for continuing texts.

    Attributes:
        max_tokens: maximum number of new tokens per text, at least one.
        choose: sampler of the model's tokens.
        shape: shape of the trees of guesses; None: decode token by token.
        end: token that ends a text; None: no such token.
        batch: number of texts that are decoded together.
    """

    max_tokens: int
    choose: Sampler
    shape: TreeShape | None = None
    end: int | None = None
    batch: int = 1


@dataclass
class _Running:
    """A text in decoding. ``index``: index of its prompt."""

    index: int
    text: Text
    done: Generation
    begun: float


@dataclass(frozen=True)
class Decoder:
    """A model ready to decode.

    Attributes:
        model: Megatron's GPTModel, with or without draft heads.
        heads: draft heads of the model; None: decode token by token.
        context: maximum number of tokens of prompt and output together.
    """

    model: GPTModel
    heads: DraftHeads | None
    context: int

    def generate(
        self, prompt: Sequence[int], request: GenerationRequest, emit: Callable[[list[int]], None] = lambda tokens: None
    ) -> Generation:
        """Continue one prompt, like ``stream``; ``emit`` receives new tokens as soon as they are accepted."""
        generation = Generation()
        for _, new, done in self.stream([prompt], request):
            emit(new)
            generation = done or generation
        return generation

    def generate_all(self, prompts: Sequence[Sequence[int]], request: GenerationRequest) -> list[Generation]:
        """Continue several prompts, like ``stream``; return the texts in the order of the prompts."""
        generations = {index: done for index, _, done in self.stream(prompts, request) if done is not None}
        return [generations[index] for index in range(len(prompts))]

    @torch.no_grad()
    def stream(
        self, prompts: Sequence[Sequence[int]], request: GenerationRequest
    ) -> Iterator[tuple[int, list[int], Generation | None]]:
        """Continue prompts, several together.

        Collective on the tensor-parallel group: all its ranks take the same steps.

        Args:
            prompts: token ids of each prompt, at least one token each.
            request: settings for continuing the prompts.

        Yields:
            (index of the prompt, new tokens as soon as they are accepted, the finished text or None).

        Raises:
            ValueError: a prompt is empty, or prompt and output exceed the context.
        """
        for prompt in prompts:
            self._check(prompt, request)
        heads = None if request.shape is None else self.heads
        passes = Passes(self.model, heads, request.choose)
        waiting, running = deque(enumerate(prompts)), list[_Running]()
        while waiting or running:
            arrived = [self._begin(*waiting.popleft(), request) for _ in range(_room(waiting, running, request))]
            if arrived:
                steps = passes.prefill([active.text for active in arrived])
            else:
                arrived, running = running, []
                trees = self._trees(passes, arrived, request)
                steps = passes.check([active.text for active in arrived], trees)
                for active, new in zip(arrived, steps, strict=True):
                    active.done.target_forwards += 1
                    active.done.accepted.append(len(new) - 1)
            for active, new in zip(arrived, steps, strict=True):
                taken, is_ended = _take(active, new, request)
                yield active.index, taken, active.done if is_ended else None
                running += [] if is_ended else [active]

    def _check(self, prompt: Sequence[int], request: GenerationRequest) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) + request.max_tokens > self.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-tokens {request.max_tokens} exceed the context of "
                f"{self.context} tokens"
            )

    def _begin(self, index: int, prompt: Sequence[int], request: GenerationRequest) -> _Running:
        rows = len(prompt) + request.max_tokens + (0 if request.shape is None else request.shape.num_tokens)
        return _Running(index, Text.of(index, prompt, rows), Generation(), time.perf_counter())

    def _trees(self, passes: Passes, running: Sequence[_Running], request: GenerationRequest) -> list[TokenTree]:
        """Return each text's tree to check: guesses below its last token, or only that token."""
        depths = [request.max_tokens - len(active.done.tokens) - 1 for active in running]
        if self.heads is None or request.shape is None or not any(depths):
            return [TokenTree((active.text.last,), (-1,)) for active in running]
        depths = [min(depth, self.heads.settings.num_heads) for depth in depths]
        return passes.draft([active.text for active in running], depths, request.shape)


def _room(waiting: Sequence[object], running: Sequence[object], request: GenerationRequest) -> int:
    """Return the number of texts that can start now."""
    return min(len(waiting), request.batch - len(running))


def _take(active: _Running, new: list[int], request: GenerationRequest) -> tuple[list[int], bool]:
    """Append new tokens up to the end of the text; return the appended tokens, and whether the text has ended."""
    done = active.done
    if request.end in new:
        new = new[: new.index(request.end) + 1]
    done.tokens += new
    done.seconds = time.perf_counter() - active.begun
    return new, len(done.tokens) >= request.max_tokens or done.tokens[-1] == request.end
