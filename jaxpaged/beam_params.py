"""What one request asks of beam search, and what it gets back, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, no_type_check

from jaxpaged import parameter_checks as checks
from jaxpaged.keywords import reject_unknown_keywords
from jaxpaged.outputs import Logprob
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

MAX_BEAMS = 4096
MAX_PENALTY = 32.0  # keeps length ** length_penalty a float


@no_type_check  # at run time: the annotations are of what is stored; what is given is checked and converted here
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Frozen, checked on construction: ValueError says what was wanted and got; an unknown keyword is a TypeError.

    The search is Hugging Face transformers': a hypothesis scores sum of log-probabilities / length ** length_penalty,
    where length counts the generated tokens, the one that ended it included.
    """

    beam_width: int  # hypotheses that are followed at once, and returned
    max_tokens: int  # longest output
    ignore_eos: bool = False  # end-of-sequence ids are tokens like others
    temperature: float = 0.0  # 0 only: the search draws nothing
    length_penalty: float = 1.0  # above 0 favours long hypotheses, below 0 short ones; 0: the sum alone counts
    # When to stop, once there are beam_width finished hypotheses. True: at once. False: when the best beam, at its
    # present length, would not beat the worst of them. "never": when it could not even at its best length.
    early_stopping: bool | str = False
    # Strings that end a hypothesis as an end-of-sequence id does; given as one string or a sequence, stored as a tuple.
    stop: tuple[str, ...] | str | Sequence[str] | None = None
    stop_token_ids: tuple[int, ...] | Sequence[int] | None = None  # ids that end it, too; stored as a tuple
    include_stop_str_in_output: bool = False  # keep the stop string (or the ending token's text) in the text
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        reject_unknown_keywords(cls.__name__, keywords, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            object.__setattr__(self, name, value)
        if self.temperature:
            raise ValueError(
                f"temperature must be 0: beam search takes the most probable tokens, got {self.temperature}; "
                "use SamplingParams to sample"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")

    def _normalised(self) -> dict[str, Any]:
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        return {
            "beam_width": checks.integer("beam_width", self.beam_width, 1, MAX_BEAMS),
            "max_tokens": checks.integer("max_tokens", self.max_tokens, 1, None),
            "temperature": checks.real("temperature", self.temperature, 0.0, float("inf")),
            "length_penalty": checks.real("length_penalty", self.length_penalty, -MAX_PENALTY, MAX_PENALTY),
            "stop": checks.strings("stop", self.stop, single=True),
            "stop_token_ids": checks.token_ids("stop_token_ids", stop_ids),
        } | {name: checks.flag(name, getattr(self, name)) for name in flags}

    def score(self, logprob: float, length: int) -> float:
        """What hypotheses of `length` generated tokens are ranked by."""
        return logprob / length**self.length_penalty

    def num_candidates(self, num_ending: int, vocab_size: int) -> int:
        """Most probable tokens to look at after each beam, when num_ending ids end a hypothesis.

        With beam_width more than there are ending ones, no beam that should go on is missed. How many end by a stop
        string cannot be known; twice the beam width is as far as transformers looks.
        """
        count = self.beam_width + num_ending
        return min(max(count, 2 * self.beam_width) if self.stop else count, vocab_size)

    def sampling_params(self, num_candidates: int) -> SamplingParams:
        """What each beam asks of the engine."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=num_candidates,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class BeamSearchSequence:
    """One hypothesis."""

    tokens: list[int]  # the prompt's and the generated ones, with the one that ended it
    text: str  # of the prompt and the output; "" without a tokenizer
    token_ids: list[int]  # the generated ones alone
    output_text: str  # of the output alone
    cum_logprob: float  # sum over the generated tokens
    score: float  # what the hypotheses are ordered by: cum_logprob / len(token_ids) ** length_penalty
    logprobs: list[dict[int, Logprob]]  # per generated token, of that token
    finish_reason: FinishReason | None  # "stop", "length"; "error" for what was cut off by one
    stop_reason: int | str | None  # the stop token id or stop string; None after an end-of-sequence token
    error: str | None  # what went wrong, with finish_reason "error"


@dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """The hypotheses for one prompt, best first: beam_width of them, or all there are."""

    sequences: list[BeamSearchSequence]
