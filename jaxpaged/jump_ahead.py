"""Jump-ahead: tokens that must come next are taken as they are, without asking the model."""

from __future__ import annotations

import itertools

from jaxpaged.request import Request
from jaxpaged.sampling_params import SamplingParams


def may_jump_ahead(params: SamplingParams) -> bool:
    """Whether nobody looks at the tokens of such a request one by one: to report, count, change or rule them out."""
    return not (
        params.wants_logprobs
        or params.prompt_logprobs is not None  # which come before the first output
        or params.penalised
        or params.logits_processor is not None
        or params.allowed_token_ids is not None
        or params.bad_words
    )


def forced_tokens(request: Request) -> list[int]:
    """The run of tokens that a request takes now; [] if it is shorter than two.

    A single one is not worth it: the row that would sample it is being computed already, and its mask forces it.
    Ids that end the output are left to the sampler, which may have to rule them out.
    """
    if request.constraint is None:
        return []
    run = list(itertools.takewhile(lambda token: not request.ends_with(token), request.constraint.forced()))
    return run if len(run) > 1 else []
