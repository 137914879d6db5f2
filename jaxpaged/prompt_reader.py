"""What a model says about given texts, without generating: log-likelihoods of continuations, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.admission import Ticket
from jaxpaged.driver import Driver
from jaxpaged.intake import Intake
from jaxpaged.outputs import ContinuationScore, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from jaxpaged.plan import Reading
from jaxpaged.prompts import Prompt
from jaxpaged.request import Readout

POOLINGS = ("last", "mean")

type Pair = tuple[list[int], list[int]]  # ids of a context and of its continuation


class PromptReader:
    """Turns texts into requests that generate nothing, and what was read off them into results."""

    def __init__(self, intake: Intake, driver: Driver) -> None:
        self._intake, self._driver = intake, driver

    def score(
        self, contexts: Sequence[Prompt], continuations: Sequence[Prompt], progress: Callable[[], object]
    ) -> list[ContinuationScore]:
        """How probable each continuation is after its context. Raises ValueError naming the pair that is refused."""
        pairs: list[Pair] = []
        tickets: list[Ticket | None] = []
        for index, (context, continuation) in enumerate(zip(contexts, continuations, strict=True)):
            try:
                pairs.append(self._pair(context, continuation))
                tickets.append(self._ticket(*pairs[-1]))
            except ValueError as error:
                raise ValueError(f"pair {index}: {error}" if len(contexts) > 1 else str(error)) from None
        # Equal beginnings next to each other: what one computes is then still in the prefix cache for the next.
        order = sorted((i for i, ticket in enumerate(tickets) if ticket is not None), key=lambda i: pairs[i])
        outputs = self._run([ticket for i in order if (ticket := tickets[i]) is not None], progress)
        found = dict(zip(order, outputs, strict=True))
        return [_score(*pair, found.get(index)) for index, pair in enumerate(pairs)]

    def embed(
        self, prompts: Sequence[Prompt], pooling: str, normalize: bool, progress: Callable[[], object]
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt. Raises ValueError naming the prompt that is refused."""
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: wanted one of {POOLINGS}, got {pooling!r}")
        tickets: list[Ticket] = []
        for index, prompt in enumerate(prompts):
            try:
                ids = self._intake.prompt(prompt).ids
                first = len(ids) - 1 if pooling == "last" and ids else 0
                readout = Readout(first=first, stop=max(1, len(ids)), scores=False)
                tickets.append(self._driver.engine.check_readout(ids, readout))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return [_embedding(output, normalize) for output in self._run(tickets, progress)]

    def _pair(self, context: Prompt, continuation: Prompt) -> Pair:
        """Ids of both. Texts are encoded in one piece, as they would be met in a text, and then cut.

        Blanks at the end of the context belong to the continuation, whose first token they usually are part of.
        """
        if not isinstance(context, str) or not isinstance(continuation, str):
            if isinstance(context, str) or isinstance(continuation, str):
                raise ValueError("wanted context and continuation both as text or both as token ids, got one of each")
            return self._intake.prompt(context).ids, self._intake.prompt(continuation).ids
        whole = context + continuation
        before = self._intake.prompt(context.rstrip()).ids
        if not before:
            raise ValueError("a context needs at least one token to go by, got none; give a beginning-of-text token")
        return before, self._intake.prompt(whole).ids[len(before) :] if continuation else []

    def _ticket(self, context: list[int], continuation: list[int]) -> Ticket | None:
        """None where there is nothing to score."""
        if not context:
            raise ValueError("a context needs at least one token to go by, got none; give a beginning-of-text token")
        if not continuation:
            return None
        readout = Readout(first=len(context) - 1, stop=len(context) + len(continuation) - 1, scores=True)
        return self._driver.engine.check_readout([*context, *continuation], readout)

    def _run(self, tickets: Sequence[Ticket], progress: Callable[[], object]) -> list[RequestOutput]:
        return self._driver.run(tickets, [0] * len(tickets), progress)


def _score(context: list[int], continuation: list[int], output: RequestOutput | None) -> ContinuationScore:
    if output is None:
        return ContinuationScore(
            context_token_ids=context, token_ids=[], logprob=0.0, logprobs=[], is_greedy=True, num_cached_tokens=0
        )
    reading = _reading(output)
    assert reading.logprobs is not None and reading.ranks is not None
    return ContinuationScore(
        context_token_ids=context,
        token_ids=continuation,
        logprob=float(reading.logprobs.astype(np.float64).sum()),
        logprobs=reading.logprobs.tolist(),
        is_greedy=bool((reading.ranks == 1).all()),
        num_cached_tokens=output.num_cached_tokens,
    )


def _embedding(output: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    reading = _reading(output)
    assert reading.state_sum is not None
    vector = reading.state_sum / reading.count
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(embedding=vector.astype(np.float32).tolist()),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        finished=output.finished,
    )


def _reading(output: RequestOutput) -> Reading:
    """Raises RuntimeError where the engine, and FloatingPointError where the model gave no result."""
    reading = output.reading
    if reading is None or reading.failed:
        kind = RuntimeError if reading is None else FloatingPointError
        raise kind(f"prompt {output.prompt_token_ids[:8]}…: {output.outputs[0].error}")
    return reading
