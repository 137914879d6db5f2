"""The scheduler's rules as plain functions: length limits, order, how much a request wants and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxpaged.config import POLICIES
from jaxpaged.plan import Reading, StepPlan, TokenLogprobs
from jaxpaged.request import FinishReason, Request, Status, described


@dataclass(frozen=True, kw_only=True)
class LengthLimits:
    """What bounds the length of a sequence, in tokens."""

    max_model_len: int  # prompt and output
    num_blocks: int  # of the KV pool, the trash block included
    block_size: int

    @property
    def capacity(self) -> int:
        """Tokens the whole KV pool holds."""
        return (self.num_blocks - 1) * self.block_size

    def check_prompt(self, num_prompt: int, *, generates: bool) -> None:
        """Raise ValueError when a prompt of so many tokens can never be served."""
        longest = self.max_model_len
        if num_prompt < 1:
            raise ValueError("a prompt must have at least one token, got none; give some text or token ids")
        if num_prompt > longest:
            bound = "shorter than" if generates else "no longer than"
            raise ValueError(
                f"a prompt must be {bound} max_model_len={longest} tokens, got {num_prompt}; "
                "shorten it or raise max_model_len"
            )
        if num_prompt == longest and generates:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_model_len is {longest}: no room is left for an "
                "output token; shorten it or raise max_model_len"
            )
        if num_prompt > self.capacity:
            raise ValueError(
                f"a prompt must fit the KV cache, which holds {self.capacity} tokens ({self.num_blocks - 1} "
                f"usable blocks of {self.block_size}), got {num_prompt}; shorten it or give the cache more memory"
            )

    def output_room(self, num_prompt: int) -> int:
        """Output tokens possible after a prompt that passed check_prompt, at least 1.

        The newest token's KV is never needed, so a request running alone may be one token longer than the pool.
        Example: max_model_len 64, 9 blocks of 4 (8 usable), prompt 31: 33 - 31 = 2.
        """
        return min(self.max_model_len, self.capacity + 1) - num_prompt


def check_sizes(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Raise ValueError for sizes that no engine can work with."""
    if max_num_seqs < 1 or max_num_batched_tokens < 1 or max_model_len < 2:
        raise ValueError(
            "max_num_seqs and max_num_batched_tokens must be at least 1 and max_model_len at least 2, "
            f"got {max_num_seqs}, {max_num_batched_tokens} and {max_model_len}"
        )


def order(policy: str) -> Callable[[Request], tuple[int, int]]:
    """The sort key of the queue and of the running list. ValueError for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy == "priority":
        return lambda request: (request.priority, request.arrival)
    return lambda request: (0, request.arrival)


def tokens_wanted(request: Request) -> int:
    """Tokens a running request has to compute; none once its last output, a beam's answer or all of its readout
    is in flight.
    """
    if not request.generates:
        return request.num_needed - request.num_computed
    outputs = request.num_outputs
    if outputs >= request.max_tokens or (request.lockstep and request.num_pending):
        return 0
    return len(request.prompt_ids) + outputs - request.num_computed


def sibling_to_share(request: Request) -> Request | None:
    """The first sample of the family, while this one should wait for it and share its prompt blocks.

    None: the request computes its own prompt (prefix cache apart), because it is no further sample, or has run
    before, or its sibling has finished or was preempted.
    """
    sibling = request.sibling
    if sibling is None or request.status != Status.WAITING or sibling.status not in (Status.WAITING, Status.RUNNING):
        return None
    return sibling


def take(request: Request, token: int, logprobs: TokenLogprobs | None) -> tuple[FinishReason, int | None] | None:
    """Give a request the token that was in flight; (finish reason, stop reason) if that ends it, else None."""
    try:
        request.receive(token, logprobs)
        return ending(request)
    except Exception as error:  # of its constraint: nobody else's affair
        request.error = described(error)
        return FinishReason.ERROR, None


def take_readings(plan: StepPlan, readings: Sequence[Reading]) -> list[tuple[Request, bool]]:
    """Hand a step's readings to their requests: (request, whether its numbers are no good) of those that end now.

    A request that has finished meanwhile gets nothing more.
    """
    ended: list[tuple[Request, bool]] = []
    for row, reading in zip(plan.reading_rows, readings, strict=True):
        request = row.request
        if request.finished or request.readout is None:
            continue
        request.readings.append(reading)
        if reading.failed:
            request.error = "what was read off the prompt was not finite"
        if reading.failed or (not request.generates and row.read.stop == request.readout.stop):
            ended.append((request, reading.failed))
    return ended


def ending(request: Request) -> tuple[FinishReason, int | None] | None:
    """(finish reason, stop reason) if the request's newest token ends it, else None.

    An end-of-sequence token at the length limit counts as "stop". Before min_tokens tokens are there, only length
    ends a request, and the completion of what it is constrained to.
    """
    count = len(request.output_ids)
    token = request.output_ids[-1]
    if count > request.params.min_tokens:
        if token in request.eos_ids:
            return FinishReason.STOP, None
        if token in request.stop_ids:
            return FinishReason.STOP, token
    if request.constraint is not None and request.constraint.finished:
        return FinishReason.STOP, None
    if count >= request.max_tokens:
        return FinishReason.LENGTH, None
    return None
