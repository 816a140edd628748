"""Decode texts: prefill in slices, guess a tree, check it in one forward pass, keep what the model accepts.

Several texts are decoded together. Their rows lie one after another in each forward pass, without padding; each has
caches of its own, and accepts as many guesses as it does. A text that ends makes room for the next.
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
    """What was generated.

    Attributes:
        tokens: without the prompt.
        target_forwards: forward passes of the model after the prompt.
        accepted: guesses that each of them accepted.
        seconds: from the prompt to the end.
    """

    tokens: list[int] = field(default_factory=list)
    target_forwards: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float | list[int]]:
        """Return the figures of a line of JSON."""
        return {
            "tokens": self.tokens,
            "target_forwards": self.target_forwards,
            "accepted": self.accepted,
            "tokens_per_second": len(self.tokens) / self.seconds,
        }


def described(texts: Sequence[Generation], seconds: float) -> str:
    """Return the figures of texts in words; ``seconds``: of all together."""
    num_tokens, passes = (sum(one) for one in zip(*((len(t.tokens), t.target_forwards) for t in texts), strict=True))
    each = sum(sum(text.accepted) for text in texts) / max(1, passes)
    return (
        f"{num_tokens} tokens in {passes} forward passes after the prompt, {each:.3f} guesses accepted each, "
        f"{num_tokens / seconds:.1f} tokens/s"
    )


@dataclass(frozen=True)
class Request:
    """How texts are to be continued.

    Attributes:
        max_tokens: the most new tokens of each, at least one.
        choose: chooses the model's tokens.
        shape: of the trees of guesses; None: token by token.
        end: token after which a text ends; None: none.
        batch: texts that are decoded together.
    """

    max_tokens: int
    choose: Sampler
    shape: TreeShape | None = None
    end: int | None = None
    batch: int = 1


@dataclass
class _Running:
    """A text that is being decoded; ``index``: of its prompt."""

    index: int
    text: Text
    done: Generation
    begun: float


@dataclass(frozen=True)
class Decoder:
    """A model ready to decode.

    Attributes:
        model: Megatron's GPTModel, with draft heads or without.
        heads: its heads; None: it decodes token by token.
        context: the most tokens of prompt and output together.
    """

    model: GPTModel
    heads: DraftHeads | None
    context: int

    def generate(
        self, prompt: Sequence[int], request: Request, emit: Callable[[list[int]], None] = lambda tokens: None
    ) -> Generation:
        """Generate tokens after one prompt, as ``stream`` does; ``emit`` is given new tokens once they are certain."""
        found = Generation()
        for _, new, done in self.stream([prompt], request):
            emit(new)
            found = done or found
        return found

    def generate_all(self, prompts: Sequence[Sequence[int]], request: Request) -> list[Generation]:
        """Generate tokens after prompts, as ``stream`` does; return the texts in the order of the prompts."""
        found = {index: done for index, _, done in self.stream(prompts, request) if done is not None}
        return [found[index] for index in range(len(prompts))]

    @torch.no_grad()
    def stream(
        self, prompts: Sequence[Sequence[int]], request: Request
    ) -> Iterator[tuple[int, list[int], Generation | None]]:
        """Generate tokens after prompts, several together.

        Collective on the tensor-parallel group: all its ranks take the same steps.

        Args:
            prompts: at least one token each.
            request: how many tokens, and how.

        Yields:
            (number of the prompt, new tokens as soon as they are certain, the whole text once it has ended).

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
                steps = passes.prefill([one.text for one in arrived])
            else:
                arrived, running = running, []
                trees = self._trees(passes, arrived, request)
                steps = passes.check([one.text for one in arrived], trees)
                for one, new in zip(arrived, steps, strict=True):
                    one.done.target_forwards += 1
                    one.done.accepted.append(len(new) - 1)
            for one, new in zip(arrived, steps, strict=True):
                taken, is_ended = _take(one, new, request)
                yield one.index, taken, one.done if is_ended else None
                running += [] if is_ended else [one]

    def _check(self, prompt: Sequence[int], request: Request) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) + request.max_tokens > self.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-tokens {request.max_tokens} exceed the context of "
                f"{self.context} tokens"
            )

    def _begin(self, index: int, prompt: Sequence[int], request: Request) -> _Running:
        rows = len(prompt) + request.max_tokens + (0 if request.shape is None else request.shape.num_tokens)
        return _Running(index, Text.of(prompt, rows), Generation(), time.perf_counter())

    def _trees(self, passes: Passes, running: Sequence[_Running], request: Request) -> list[TokenTree]:
        """Return what is to be checked of each text: a tree below its last token, or that token alone."""
        depths = [request.max_tokens - len(one.done.tokens) - 1 for one in running]
        if self.heads is None or request.shape is None or not any(depths):
            return [TokenTree((one.text.last,), (-1,)) for one in running]
        depths = [min(depth, self.heads.settings.num_heads) for depth in depths]
        return passes.draft([one.text for one in running], depths, request.shape)


def _room(waiting: Sequence[object], running: Sequence[object], request: Request) -> int:
    """Return how many texts can begin."""
    return min(len(waiting), request.batch - len(running))


def _take(one: _Running, new: list[int], request: Request) -> tuple[list[int], bool]:
    """Add new tokens up to the end of the text; return those taken, and whether the end is there."""
    done = one.done
    if request.end in new:
        new = new[: new.index(request.end) + 1]
    done.tokens += new
    done.seconds = time.perf_counter() - one.begun
    return new, len(done.tokens) >= request.max_tokens or done.tokens[-1] == request.end
