"""What a caller gets back for a request, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpaged.plan import Reading
from jaxpaged.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability (natural logarithm, from the raw logits) at one position."""

    logprob: float
    rank: int | None  # 1 is the most probable token of the whole vocabulary; None: not known (logprob_token_ids)
    decoded_token: str  # "" for ids without a tokenizer entry


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of a request. With RequestOutputKind.DELTA the text, ids and logprobs are only the new ones."""

    index: int  # of the sample, 0 <= index < n
    text: str  # "" when detokenize=False
    token_ids: list[int]  # include the token that ended the output (stop token or end of a stop string)
    cumulative_logprob: float | None  # sum over all tokens so far; None without logprobs
    # Per token {token id: Logprob}: the sampled token first, then the most probable ones; None without logprobs.
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None  # None while running; a string enum: "stop", "length", "abort", "error"
    stop_reason: int | str | None  # the stop token id or stop string; None after an end-of-sequence token
    error: str | None = None  # what went wrong, with finish_reason "error"

    @property
    def finished(self) -> bool:
        """Whether this sample is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The outputs of one request: n samples, in order of their index."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    # Per prompt token {token id: Logprob}: the token itself first, then the best ones; the first entry is None.
    # None unless asked for, and after the first output of a stream of kind DELTA.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool  # whether all samples are complete
    num_cached_tokens: int  # prompt tokens that were taken from the prefix cache
    metrics: Any | None  # timing of the request, where the engine keeps it
    # Of a request that generates nothing (its one sample is empty): what was read off its prompt, once it is complete.
    reading: Reading | None = None


@dataclass(frozen=True, kw_only=True)
class ContinuationScore:
    """How probable one continuation is after its context, by the raw logits; natural logarithms."""

    context_token_ids: list[int]
    token_ids: list[int]  # of the continuation
    logprob: float  # sum of logprobs
    logprobs: list[float]  # of each of the continuation's tokens after all before it
    is_greedy: bool  # whether each token is the most probable one: what greedy decoding would give
    num_cached_tokens: int  # tokens of the context that were taken from the prefix cache


@dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """A vector made of the model's final hidden states."""

    embedding: list[float]  # as long as the model is wide

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
