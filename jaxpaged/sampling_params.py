"""What one request asks of sampling, under vLLM's names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, no_type_check

from jaxpaged.keywords import reject_unknown_keywords
from jaxpaged.parameter_checks import (
    biases,
    count_of_logprobs,
    flag,
    integer,
    optional,
    real,
    strings,
    token_ids,
)
from jaxpaged.structured_params import StructuredOutputsParams

GREEDY_BELOW = 1e-5  # a temperature below this means: take the most probable token
MAX_SAMPLES = 16384  # largest n
MAX_BIASES = 1024  # entries of logit_bias
LARGEST_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_SCORED_IDS = 128  # entries of logprob_token_ids
_FLOAT32_MAX = 3.4028234e38


class RequestOutputKind(enum.Enum):
    """What each output of a running request carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # nothing until the request has finished


@no_type_check  # at run time: the annotations are of what is stored; what is given is checked and converted here
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Frozen, checked on construction: ValueError says what was wanted and got; an unknown keyword is a TypeError.

    Meaning and defaults are vLLM's, with these deviations: any finite temperature is accepted (vLLM stops at 2) and a
    small one is not raised to 0.01; values are stored as they were given, so top_p, top_k and min_p stay set, and
    unused, when the temperature is greedy.
    """

    n: int = 1  # independent samples of the prompt; must be 1 when greedy
    presence_penalty: float = 0.0  # [-2, 2]: taken off the logit of every token that is in the output
    frequency_penalty: float = 0.0  # [-2, 2]: taken off once for each time the token is in the output
    # Above 0: positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied.
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # >= 0; below 1e-5 is greedy
    top_p: float = 1.0  # (0, 1]; 1 is off
    top_k: int = 0  # 0 is off (-1 is accepted and stored as 0); more than the vocabulary is off, too
    min_p: float = 0.0  # [0, 1]; 0 is off
    seed: int | None = None  # stored modulo 2**64; None (or -1): drawn anew for each request
    # Strings at which the text is cut; given as one string or a sequence, stored as a tuple.
    stop: tuple[str, ...] | str | Sequence[str] | None = None
    stop_token_ids: tuple[int, ...] | Sequence[int] | None = None  # ids that end the output; stored as a tuple
    ignore_eos: bool = False  # go on after end-of-sequence ids; stop_token_ids still end the output
    max_tokens: int | None = 16  # None: up to the model's length limit
    # Before so many tokens are generated no end-of-sequence id and no stop id can be sampled. A stop string that lies
    # wholly inside the first min_tokens tokens does not end the output, then or later.
    min_tokens: int = 0
    # Top k per token and the sampled token's own; 0: only its own; -1: the whole vocabulary; True: 1; False: None.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens
    # Report the log-probabilities of these ids (at most 128) instead of the top k; logprobs: None, or their number.
    logprob_token_ids: tuple[int, ...] | Sequence[int] | None = None
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] | None = None  # added to logits; stored as pairs
    allowed_token_ids: tuple[int, ...] | Sequence[int] | None = None  # only these can be sampled
    # Words that must not be generated, with or without a space before them; stored as a tuple.
    bad_words: tuple[str, ...] | Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None  # the form the output must have
    # A function of (TokenHistory, logits f32[V]) that JAX can trace, returning the logits to sample from.
    logits_processor: Callable[..., Any] | None = None
    truncate_prompt_tokens: int | None = None  # keep the prompt's last so many tokens; -1: as many as the model takes
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; None: only where prompt_logprobs need it
    detokenize: bool = True  # False: no text, only token ids
    skip_special_tokens: bool = True  # leave special tokens out of the text
    spaces_between_special_tokens: bool = True  # where the tokenizer can tell: spaces around special tokens in the text
    include_stop_str_in_output: bool = False  # keep the stop string (or stop token's text) at the end of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens between two outputs, if more than the engine's own stream_interval

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        reject_unknown_keywords(cls.__name__, keywords, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            object.__setattr__(self, name, value)
        for name in (field.name for field in fields(self) if field.type == "bool"):
            flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(f"structured_outputs must be a StructuredOutputsParams, got {self.structured_outputs!r}")
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError(f"logits_processor must be a function or None, got {self.logits_processor!r}")
        self._check_combinations()

    def _normalised(self) -> dict[str, Any]:
        """Every field that needs conversion, checked alone."""
        top_k = 0 if self.top_k == -1 else self.top_k
        seed = None if self.seed == -1 else optional(integer, "seed", self.seed, -(2**63), 2**64 - 1)
        return {
            "n": integer("n", self.n, 1, MAX_SAMPLES),
            "presence_penalty": real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": real(
                "repetition_penalty", self.repetition_penalty, 0.0, _FLOAT32_MAX, low_excluded=True
            ),
            "temperature": real("temperature", self.temperature, 0.0, _FLOAT32_MAX),
            "top_p": real("top_p", self.top_p, 0.0, 1.0, low_excluded=True),
            "top_k": integer("top_k", top_k, 0, None),
            "min_p": real("min_p", self.min_p, 0.0, 1.0),
            "seed": None if seed is None else seed % 2**64,
            "stop": strings("stop", self.stop, single=True),
            "bad_words": strings("bad_words", self.bad_words, single=False),
            "stop_token_ids": token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids),
            "logprob_token_ids": optional(
                token_ids, "logprob_token_ids", self.logprob_token_ids, most=MAX_SCORED_IDS, empty=False
            ),
            "allowed_token_ids": optional(token_ids, "allowed_token_ids", self.allowed_token_ids, empty=False),
            "logit_bias": optional(biases, "logit_bias", self.logit_bias, largest=LARGEST_BIAS, most=MAX_BIASES),
            "max_tokens": optional(integer, "max_tokens", self.max_tokens, 1, None),
            "min_tokens": integer("min_tokens", self.min_tokens, 0, None),
            "logprobs": count_of_logprobs("logprobs", self.logprobs),
            "prompt_logprobs": count_of_logprobs("prompt_logprobs", self.prompt_logprobs),
            "truncate_prompt_tokens": optional(_truncation, "truncate_prompt_tokens", self.truncate_prompt_tokens),
            "stream_interval": optional(integer, "stream_interval", self.stream_interval, 1, None),
            "skip_reading_prefix_cache": optional(flag, "skip_reading_prefix_cache", self.skip_reading_prefix_cache),
        }

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not be more than max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
            )
        if self.n > 1 and self.greedy:
            raise ValueError(
                f"n must be 1 when sampling is greedy (all samples would be equal), got n={self.n} and "
                f"temperature={self.temperature}; use a higher temperature"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are searched in the text: they need detokenize=True, got False")
        if len(self.words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words must be at most {MAX_BAD_WORDS} words, got {len(self.words)}")
        if self.logprob_token_ids is not None and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise ValueError(
                f"logprob_token_ids take the place of the most probable tokens: logprobs must be left out or be their "
                f"number {len(self.logprob_token_ids)}, got logprobs={self.logprobs}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is stored, for type checkers."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as it is stored, for type checkers."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def words(self) -> tuple[str, ...]:
        """`bad_words` as it is stored, for type checkers."""
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    @property
    def penalised(self) -> bool:
        """Whether what was generated, or the prompt, changes the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token comes with log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand for parts of the prompt: not where every position's logits are wanted."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model: ids lie in [0, vocab_size), logprobs <= max_logprobs and vocab_size.

        max_logprobs -1 is the vocabulary size. Raises ValueError naming the parameter, the limit and the value.
        """
        biased = () if self.logit_bias is None else tuple(dict(self.logit_bias))
        lists = {name: getattr(self, name) for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")}
        for name, ids in (lists | {"logit_bias": biased}).items():
            for token_id in ids or ():
                if token_id >= vocab_size:
                    raise ValueError(f"{name} must be below the vocabulary size {vocab_size}, got {token_id}")
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if name == "logprobs" and self.logprob_token_ids is not None:
                continue
            if wanted is not None and (vocab_size if wanted == -1 else wanted) > limit:
                raise ValueError(
                    f"{name} must be at most {limit} (max_logprobs={max_logprobs}, vocabulary {vocab_size}), "
                    f"got {wanted}; ask for fewer or raise max_logprobs of the engine"
                )


def _truncation(name: str, value: object) -> int:
    """-1, or a number of tokens."""
    if value == -1:
        return -1
    return integer(name, value, 1, None)
