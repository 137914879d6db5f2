"""What one request asks of sampling, under vLLM's names."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Self, no_type_check

from jaxpaged.keywords import reject_unknown_keywords

GREEDY_BELOW = 1e-5  # a temperature below this means: take the most probable token
MAX_SAMPLES = 16384  # largest n
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
    small one is not raised to 0.01; logprobs=-1 is refused (give a number); values are stored as they were given,
    so top_p, top_k and min_p stay set, and unused, when the temperature is greedy.
    """

    n: int = 1  # independent samples of the prompt; must be 1 when greedy
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
    logprobs: int | None = None  # top k per token and the sampled token's own; 0: only its own; True: 1; False: None
    detokenize: bool = True  # False: no text, only token ids
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False  # keep the stop string (or stop token's text) at the end of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        reject_unknown_keywords(cls.__name__, keywords, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            object.__setattr__(self, name, value)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        self._check_combinations()

    def _normalised(self) -> dict[str, Any]:
        """Every field that needs conversion, checked alone."""
        top_k = 0 if self.top_k == -1 else self.top_k
        seed = None if self.seed == -1 else self.seed
        logprobs = int(self.logprobs) or None if isinstance(self.logprobs, bool) else self.logprobs
        return {
            "n": _integer("n", self.n, 1, MAX_SAMPLES),
            "temperature": _real("temperature", self.temperature, 0.0, _FLOAT32_MAX),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, low_excluded=True),
            "top_k": _integer("top_k", top_k, 0, None),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "seed": None if seed is None else _integer("seed", seed, -(2**63), 2**64 - 1) % 2**64,
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1, None),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, None),
            "logprobs": None if logprobs is None else _integer("logprobs", logprobs, 0, None),
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

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model: stop ids lie in [0, vocab_size), logprobs <= max_logprobs and vocab_size.

        Raises ValueError naming the parameter, the limit and the value.
        """
        for token_id in self.stop_ids:
            if token_id >= vocab_size:
                raise ValueError(f"stop_token_ids must be below the vocabulary size {vocab_size}, got {token_id}")
        if self.logprobs is not None and self.logprobs > min(max_logprobs, vocab_size):
            raise ValueError(
                f"logprobs must be at most {min(max_logprobs, vocab_size)} (max_logprobs={max_logprobs}, vocabulary "
                f"{vocab_size}), got {self.logprobs}; ask for fewer or raise max_logprobs of the engine"
            )


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    """`value` as int if it is an integer (numpy's included, bool not) in [low, high]."""
    limits = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def _real(name: str, value: object, low: float, high: float, *, low_excluded: bool = False) -> float:
    """`value` as float if it is a finite real number in [low, high], or in (low, high]."""
    opening = "(" if low_excluded else "["
    limits = f"a number in {opening}{low:g}, {high:g}]"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    number = float(value)
    inside = low < number <= high if low_excluded else low <= number <= high
    if not math.isfinite(number) or not inside:
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value if value is not None else ()
    if not isinstance(strings, Sequence):
        raise ValueError(f"stop must be a string or a sequence of strings, got {value!r}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}; leave it out for no stop string")
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if value is not None else ()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"stop_token_ids must be a sequence of token ids, got {value!r}")
    return tuple(_integer("stop_token_ids", token_id, 0, None) for token_id in ids)
