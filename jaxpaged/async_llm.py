"""AsyncLLM: the front end for asyncio, as a vLLM user knows it."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from jaxpaged.beam_output import beam_output
from jaxpaged.beam_params import BeamSearchOutput, BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_thread import EngineThread
from jaxpaged.intake import ChatOptions, Intake, ranks
from jaxpaged.outputs import RequestOutput
from jaxpaged.prompts import ChatMessage, Prompt, Tokenized
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Tokenizer

SHORT = 4096  # characters of text that are tokenised at once; longer text does not hold up the event loop


class AsyncLLM:
    """A model that serves any number of coroutines, of any number of event loops, from one thread of its own.

    AsyncLLM(model, **options): the options are EngineConfig's fields; loading blocks, as LLM's.
    Use as `async with`, or call shutdown() in the end.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._begin(Engine(EngineConfig.create(model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Around an engine that exists already (such as LLM's), which nobody else may use from now on."""
        made = cls.__new__(cls)
        made._begin(engine)
        return made

    def _begin(self, engine: Engine) -> None:
        self._intake = Intake(engine)
        self._thread = EngineThread(engine)
        self._finalizer = weakref.finalize(self, _shut_down, self._thread)  # also at the end of the process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield one request's outputs as they come, as the parameters' output_kind says.

        A reader that is slow gets fewer outputs, none of them older than need be: with DELTA those it has not read
        are joined, with CUMULATIVE the newest one stands for all. The request is queued by the first step of the
        iteration; cancelling it, or closing the generator, ends the request before the engine's next step.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None: get_default_sampling_params().
            request_id: must not be in use; None: a random one.
            priority: lower runs earlier (scheduling_policy="priority").

        Raises, in the iteration: ValueError for a bad request, QueueFull beyond max_num_queued_reqs, EngineDead after
        shutdown() or when the engine's thread has ended.
        """
        return self._stream(
            lambda: self._intake.prompt(prompt), _is_long(prompt), sampling_params, request_id, priority
        )

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation, through the chat template as LLM.chat does; else as generate()."""
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

        def read() -> Tokenized:
            conversations = self._intake.chats(messages, options)
            if len(conversations) != 1:
                raise ValueError(f"messages: wanted one conversation, got {len(conversations)}")
            return conversations[0]

        return self._stream(read, True, sampling_params, request_id, priority)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> BeamSearchOutput:
        """The most probable continuations of one prompt, as LLM.beam_search finds them, when the search is over.

        Cancelling it ends the search before the engine's next step; abort() does, too, and what was found by then is
        returned, the unfinished hypotheses with finish reason "abort". Raises as generate(), and ValueError for a
        beam_width beyond what the engine's max_num_seqs or max_logprobs allow.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params: wanted BeamSearchParams, got {params!r}")
        outputs = self._stream(lambda: self._intake.prompt(prompt), _is_long(prompt), params, request_id, priority)
        async with aclosing(outputs):
            (output,) = [output async for output in outputs]
        return beam_output(output, params, self._thread.engine.tokenizer)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several; unknown ids are ignored. Their readers get a last output, reason "abort".

        When this returns their blocks are free. Raises EngineDead.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._thread.abort(ids))

    async def call[Result](self, function: Callable[[Engine], Result]) -> Result:
        """function(engine), called between two steps on the engine's thread; raises what it raises, or EngineDead."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return await self.call(Engine.reset_prefix_cache)

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, see Engine.stats."""
        return await self.call(Engine.stats)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError with skip_tokenizer_init=True."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over SamplingParams' own defaults."""
        return self._intake.recommended()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.running

    @property
    def errored(self) -> bool:
        """Whether an error has ended the engine's thread. A failing request or step does not."""
        return self._thread.error is not None

    @property
    def dead_error(self) -> BaseException | None:
        """The error that ended the engine's thread, if any."""
        return self._thread.error

    def shutdown(self) -> None:
        """End all requests, with finish reason "abort", and the thread; waits for the step that is being made.

        Safe to call again, and from any thread; in an event loop it blocks for that long.
        """
        self._finalizer()

    async def _stream(
        self,
        read: Callable[[], Tokenized],
        takes_long: bool,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput]:
        tokenized = await asyncio.to_thread(read) if takes_long else read()
        each = params if isinstance(params, BeamSearchParams) else self._intake.params(params, 1, None)
        (ticket,) = self._intake.tickets([tokenized], each)
        (rank,) = ranks([priority], 1)
        name = uuid.uuid4().hex if request_id is None else request_id
        subscription = self._thread.subscribe(name, ticket, priority=rank)
        try:
            finished = False
            while not finished:
                output = await subscription.mailbox.get()
                finished = output.finished
                yield output
        finally:
            self._thread.cancel(subscription)


def _is_long(prompt: Prompt) -> bool:
    """Whether making ids of it would hold up the event loop."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return isinstance(text, str) and len(text) > SHORT


def _shut_down(thread: EngineThread) -> None:
    thread.stop()
    thread.engine.close()
