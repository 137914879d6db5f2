"""From what callers give to what the engine takes: prompts, conversations, sampling parameters, priorities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jaxpaged.admission import Ticket
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.engine import Engine
from jaxpaged.prompts import ChatMessage, Prompt, Tokenized, conversations_of, prompts_of, tokenize
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer

type ParamsGiven = SamplingParams | Sequence[SamplingParams] | None

_RECOMMENDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}  # names in generation_config.json, and ours


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered; the fields are those of LLM.chat."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class Intake:
    """Reads an engine's tokenizer, template and recommendations; changes nothing and may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError when the engine has none."""
        if self._engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer: it was built with skip_tokenizer_init=True")
        return self._engine.tokenizer

    def recommended(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over SamplingParams' own defaults."""
        given = self._engine.generation_config
        return SamplingParams(**{ours: given[hf] for hf, ours in _RECOMMENDED.items() if given.get(hf) is not None})

    def prompts(self, given: Prompt | Sequence[Prompt]) -> list[Tokenized]:
        """One prompt or several, as ids. Raises ValueError for what is no prompt."""
        return [self.prompt(prompt) for prompt in prompts_of(given)]

    def prompt(self, given: Prompt) -> Tokenized:
        """One prompt as ids."""
        return tokenize(given, self._engine.tokenizer)

    def chats(self, messages: Sequence[Any], options: ChatOptions) -> list[Tokenized]:
        """One conversation or several, through the chat template.

        The template writes what begins a sequence, so no such token is added a second time.
        Raises ValueError when there is no template or it refuses the messages.
        """
        return [self._render(conversation, options) for conversation in conversations_of(messages)]

    def params(self, given: ParamsGiven, count: int, kind: RequestOutputKind | None) -> list[SamplingParams]:
        """One SamplingParams for each of count prompts; kind, unless None, goes before their own output_kind.

        Raises ValueError for anything else than SamplingParams, one for all or one for each.
        """
        params = self.recommended() if given is None else given
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(item, SamplingParams) for item in each):
            raise ValueError(
                f"sampling_params: wanted SamplingParams, or a list with one for each prompt, got {given!r}"
            )
        _check_count("sampling_params", each, count)
        return list(each) if kind is None else [dataclasses.replace(item, output_kind=kind) for item in each]

    def tickets(
        self, prompts: Sequence[Tokenized], params: Sequence[SamplingParams] | BeamSearchParams
    ) -> list[Ticket]:
        """Every request checked, before the first is queued. Raises ValueError, of several naming the prompt."""
        tickets: list[Ticket] = []
        for index, prompt in enumerate(prompts):
            try:
                if isinstance(params, BeamSearchParams):
                    tickets.append(self._engine.check_beams(prompt.ids, params, prompt=prompt.text))
                else:
                    tickets.append(self._engine.check(prompt.ids, params[index], prompt=prompt.text))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return tickets

    def _render(self, conversation: Sequence[ChatMessage], options: ChatOptions) -> Tokenized:
        text = self.tokenizer.apply_chat_template(
            list(conversation),
            chat_template=options.chat_template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=options.tools,
            **(options.chat_template_kwargs or {}),
        )
        return Tokenized(text=text, ids=self.tokenizer.encode(text, add_special_tokens=False))


def ranks(priority: Sequence[int] | None, count: int) -> list[int]:
    """One priority for each of count prompts; 0 where none is given. Raises ValueError for anything else."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or not all(isinstance(rank, Integral) for rank in priority):
        raise ValueError(f"priority: wanted a list of integers, one for each prompt, got {priority!r}")
    _check_count("priority", priority, count)
    return list(priority)


def _check_count(name: str, given: Sequence[object], count: int) -> None:
    if len(given) != count:
        raise ValueError(f"{name}: wanted one for each of the {count} prompts, got {len(given)}")
