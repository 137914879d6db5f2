"""A request as the engine keeps it: its sampling parameters, its tokens and where it stands."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxpaged.constraints import TokenConstraint
    from jaxpaged.plan import Reading, TokenLogprobs


class Status(enum.IntEnum):
    """Life of a request, ordered: everything from FINISHED on is over."""

    WAITING = 0  # in the queue, holds no blocks
    RUNNING = 1  # has a slot and blocks
    PREEMPTED = 2  # in the queue again, keeps its outputs, holds no blocks
    FINISHED = 3


class FinishReason(enum.StrEnum):
    """Why generation ended (vLLM's words)."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, max_model_len or the KV pool's size
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Readout:
    """What is read off a prompt's own positions [first, stop): how probable the following tokens are, or embeddings.

    Position p tells how probable the token at p + 1 is, so scoring a prompt of n tokens reads [0, n - 1).
    Positions from `first` on have to be computed: what the prefix cache holds of them cannot be read.
    """

    first: int
    stop: int  # more than first
    scores: bool  # True: log-probabilities of the tokens that follow; False: final hidden states
    num_top: int = 0  # alternatives reported with each score


@dataclass(kw_only=True, eq=False)
class Request:
    """One sequence. Owned by the scheduler: nobody else changes it.

    Invariant: num_computed <= num_tokens, and the blocks of the row cover at least num_computed tokens.
    num_tokens counts known tokens and the ones still in flight on the device (num_pending).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens cut to what max_model_len leaves
    seed: int  # resolved: uint64; the request's own or drawn by the engine
    eos_ids: frozenset[int]  # empty when params.ignore_eos
    # Ids that end the output besides: params.stop_token_ids, and stop strings that are one special token.
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs earlier (policy "priority")
    arrival: int = 0  # running number, set by the scheduler
    cache_key: bytes = b""  # extra key of the prefix-hash chain (salt, adapter, rope length)
    sibling: Request | None = None  # n > 1: the first sample, whose prompt blocks this one shares
    readout: Readout | None = None  # what is read off the prompt
    generates: bool = True  # False: nothing is sampled, the request ends with its readout
    allowed: np.ndarray | None = None  # packed mask of the tokens that may come at all; None: all of them
    constraint: TokenConstraint | None = None  # what may come next, where that depends on what came before
    jumps_ahead: bool = False  # tokens that the constraint forces are taken without sampling
    lockstep: bool = False  # a beam: answered with log-probabilities instead of sampled, extended by its search

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # what went wrong, with finish reason "error"
    num_computed: int = 0  # tokens whose KV is in the cache (or in flight to it)
    num_pending: int = 0  # sampled on the device, not yet read by the host (0 or 1)
    num_disregarded: int = 0  # samples in flight that will be dropped, because a forced token took their place
    num_read: int = 0  # positions of the readout that were planned to be read
    readings: list[Reading] = field(default_factory=list)  # in order of position, of steps whose results are known
    num_cached: int = 0  # prompt tokens taken from the prefix cache or a sibling at first admission
    num_preemptions: int = 0
    slot: int | None = None
    answer: TokenLogprobs | None = None  # lockstep: what may come next; until it is extended the request is idle

    @functools.cached_property
    def adjusts(self) -> bool:
        """Whether its logits need more than temperature and filters, or other log-probabilities than the top ones."""
        params = self.params
        return (
            params.penalised
            or bool(params.logit_bias)
            or params.logits_processor is not None
            or params.logprob_token_ids is not None
            or self.allowed is not None
            or self.constraint is not None
        )

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt, known outputs and outputs in flight."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Known outputs and outputs in flight."""
        return len(self.output_ids) + self.num_pending

    @property
    def next_to_read(self) -> int | None:
        """First position still to be read; None when all of the readout is planned, or none was asked for."""
        if self.readout is None or self.readout.first + self.num_read >= self.readout.stop:
            return None
        return self.readout.first + self.num_read

    @property
    def num_needed(self) -> int:
        """Tokens to compute: all there are, but only what is read of them where nothing is generated."""
        if self.generates:
            return self.num_tokens
        assert self.readout is not None, f"{self.request_id} has nothing to do"
        return self.readout.stop

    @property
    def on_its_way(self) -> bool:
        """Whether a result that the request waits for is still in flight: it cannot be planned from the host."""
        return self.num_pending > 0 if self.generates else self.next_to_read is None

    def banned_at(self, num_outputs: int) -> frozenset[int]:
        """Ids that must not be sampled as output number num_outputs (from 0): what would end it before min_tokens."""
        return self.eos_ids | self.stop_ids if num_outputs < self.params.min_tokens else frozenset()

    def ends_with(self, token: int) -> bool:
        """Whether this token is an end-of-sequence or stop id, which is no part of the text."""
        return token in self.eos_ids or token in self.stop_ids

    def disregards_sample(self) -> bool:
        """Whether the oldest sample in flight is to be dropped; asked once for each."""
        if not self.num_disregarded:
            return False
        self.num_disregarded -= 1
        return True

    @property
    def finished(self) -> bool:
        return self.status >= Status.FINISHED

    def receive(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """The next output, which was in flight. Raises what the request's constraint raises."""
        self.num_pending -= 1
        self.output_ids.append(token)
        self.logprobs.append(logprobs)
        if self.constraint is not None:
            self.constraint.accept(token)

    def lose_progress(self) -> None:
        """Back to the state of a queued request: nothing is computed or in flight, what is known stays."""
        if self.status == Status.RUNNING:
            self.status = Status.PREEMPTED
            self.num_preemptions += 1
        self.slot = None
        self.num_computed = self.num_pending = self.num_disregarded = 0
        self.num_read = sum(reading.count for reading in self.readings)

    def forked(self, request_id: str, token: int) -> Request:
        """A new request that continues this one's known tokens with one more: see Scheduler.fork."""
        return replace(
            self,
            request_id=request_id,
            output_ids=[*self.output_ids, token],
            logprobs=[],
            status=Status.WAITING,
            num_computed=0,
            num_preemptions=0,
            slot=None,
            answer=None,
            readout=None,  # the prompt is read once
            readings=[],
        )

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) that the host knows; shorter if some are in flight."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return list(self.prompt_ids[start:stop]) + self.output_ids[: max(0, stop - prompt)]


def described(error: Exception) -> str:
    """An exception in a line, as Request.error has it."""
    return f"{type(error).__name__}: {error}"
