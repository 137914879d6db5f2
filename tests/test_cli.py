"""The command line, with an engine that plays back what a test gives it."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.sampling_params import SamplingParams


def output(text: str, *, tokens: int = 3) -> SimpleNamespace:
    """As much of a RequestOutput as the command line reads."""
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=list(range(tokens)))])


@dataclass
class FakeLLM:
    """Records its calls; streams the pieces, pressing Ctrl-C once for each None among them."""

    model: str
    options: dict[str, Any]
    pieces: list[str | None] = field(default_factory=lambda: ["One", " two", " three"])
    calls: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed: int = 0  # streams closed

    def close(self) -> None:
        """As LLM.close: nothing to do."""

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[SimpleNamespace]:
        self.calls.append((prompts, params))
        return [SimpleNamespace(outputs=output(f" after {prompt}").outputs * params.n) for prompt in prompts]

    def chat(self, messages: list[Any], params: SamplingParams, use_tqdm: bool) -> list[SimpleNamespace]:
        self.calls.append((messages, params))
        return [output(f"Answer to {conversation[-1]['content']}") for conversation in messages]

    def generate_stream(self, messages: list[Any], params: SamplingParams) -> Iterator[SimpleNamespace]:
        if not self.pieces:
            raise ValueError("the conversation is too long:\n  start a new one")
        self.calls.append((messages, params))
        try:
            for piece in self.pieces:
                if piece is None:
                    signal.raise_signal(signal.SIGINT)
                else:
                    yield output(piece)
        finally:
            self.closed += 1

    def stats(self) -> dict[str, float]:
        return {"blocks_used_peak": 41, "blocks_shared_peak": 7}


class Maker:
    """Stands for LLM: makes one FakeLLM and keeps it."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes
        self.made: list[FakeLLM] = []

    def __call__(self, model: str, **options: Any) -> FakeLLM:
        self.made.append(FakeLLM(model, options, **self.attributes))
        return self.made[-1]

    @property
    def llm(self) -> FakeLLM:
        (llm,) = self.made
        return llm


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the lines typed at the prompt; an exception class is what the keyboard raises. Ends with Ctrl-D."""

    def give(*lines: str | type[BaseException]) -> None:
        script = iter([*lines, EOFError])

        def read(prompt: str) -> str:
            line = next(script)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)

    return give


def test_generate_prints_one_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    maker = Maker()
    assert cli.main(["generate", "some/model", "the sea"], make_llm=maker) == 0
    printed = capsys.readouterr()
    assert printed.out == " after the sea\n"
    assert "1 requests, 3 tokens" in printed.err
    assert (maker.llm.model, maker.llm.options) == ("some/model", {})


def test_generate_prints_every_sample_under_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "m", "a", "b", "--n", "2", "--temperature", "1"], make_llm=Maker()) == 0
    assert capsys.readouterr().out == "> a\n after a\n\n" * 2 + "> b\n after b\n\n" * 2


def test_options_reach_engine_and_sampling_separately() -> None:
    """--seed belongs to the engine, although requests have a seed, too."""
    maker = Maker()
    arguments = ["--block-size", "32", "--no-enable-prefix-caching", "--seed", "5", "--top-k", "4", "--stop", "x"]
    assert cli.main(["generate", "m", "a", *arguments, "--stop", "y", "--max-tokens", "9"], make_llm=maker) == 0
    assert maker.llm.options == {"block_size": 32, "enable_prefix_caching": False, "seed": 5}
    assert maker.llm.calls == [(["a"], SamplingParams(top_k=4, stop=("x", "y"), max_tokens=9))]


def test_options_not_given_are_left_to_the_config() -> None:
    """A default repeated on the command line would go stale when the configuration's changes."""
    maker = Maker()
    assert cli.main(["generate", "m", "a"], make_llm=maker) == 0
    assert maker.llm.options == {}


def test_every_engine_field_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["chat", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    missing = [name for name in cli.engine_fields() if f"--{name.replace('_', '-')}" not in text]
    assert missing == []
    assert "--hf-token" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "m"], "required: PROMPT"),
        (["generate", "m", "a", "--block-size", "many"], "invalid int value: 'many'"),
        (["generate", "m", "a", "--blok-size", "16"], "unrecognized arguments: --blok-size"),
        (["generate", "m", "a", "--block-size", "3"], "block_size: wanted a power of two, got 3"),
        (["generate", "m", "a", "--top-p", "2"], "top_p must be"),
        (["chat", "m", "--temperature", "-1"], "temperature must be"),
        (["demo", "--max-tokens", "0"], "max_tokens must be"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = Maker()
    try:
        code = cli.main(arguments, make_llm=maker)
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert maker.made == []


@pytest.mark.parametrize("error", [ValueError("no tensor named\n  a\n  b"), FileNotFoundError("no tensor named a b")])
def test_errors_while_loading_are_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(model: str, **options: Any) -> FakeLLM:
        raise error

    assert cli.main(["generate", "m", "a"], make_llm=fail) == 2
    assert capsys.readouterr().err == "jaxpaged: error: no tensor named a b\n"
    with pytest.raises(type(error)):
        cli.main(["generate", "m", "a", "--traceback"], make_llm=fail)


def test_interrupt_while_loading_leaves_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    def press(model: str, **options: Any) -> FakeLLM:
        raise KeyboardInterrupt

    assert cli.main(["demo"], make_llm=press) == 130
    assert capsys.readouterr().err == "\n"


def test_demo_shows_texts_speed_and_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    maker = Maker()
    assert cli.main(["demo"], make_llm=maker) == 0
    text = capsys.readouterr().out
    ((conversations, params),) = maker.llm.calls
    assert maker.llm.model == "demo"
    assert params.greedy
    assert len({conversation[0]["content"] for conversation in conversations}) == 1, "no common beginning to share"
    for conversation in conversations:
        assert f"Answer to {conversation[-1]['content']}" in text
    assert f"{len(conversations)} requests, {3 * len(conversations)} tokens in " in text
    assert "tokens/s" in text
    assert "41 used, 7 of them shared" in text


def test_chat_streams_and_remembers(type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    maker = Maker()
    type_lines("first", "   ", "second")
    assert cli.main(["chat", "m", "--system", "Be brief."], make_llm=maker) == 0
    assert capsys.readouterr().out == "One two three\n" * 2 + "\n"
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "first"}]
    second = [*first, {"role": "assistant", "content": "One two three"}, {"role": "user", "content": "second"}]
    assert [messages for messages, _ in maker.llm.calls] == [first, second]
    assert {params.max_tokens for _, params in maker.llm.calls} == {None}


def test_interrupt_stops_the_answer_and_the_chat_goes_on(
    type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A KeyboardInterrupt raised inside an engine step would lose the donated cache and every later answer."""
    before = signal.getsignal(signal.SIGINT)
    maker = Maker(pieces=["One", None, " two", " three"])
    type_lines("first", "second")
    assert cli.main(["chat", "m"], make_llm=maker) == 0
    assert capsys.readouterr().out == "One two [stopped]\n" * 2 + "\n"
    assert maker.llm.closed == 2, "the stopped request was not aborted"
    assert maker.llm.calls[1][0][1] == {"role": "assistant", "content": "One two"}
    assert signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_leaves(type_lines: Callable[..., None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    maker = Maker(pieces=["One", None, None, " two"])
    type_lines("first", "second")
    assert cli.main(["chat", "m"], make_llm=maker) == 130
    assert len(maker.llm.calls) == maker.llm.closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_at_the_prompt_leaves(type_lines: Callable[..., None]) -> None:
    maker = Maker()
    type_lines("first", KeyboardInterrupt, "second")
    assert cli.main(["chat", "m"], make_llm=maker) == 0
    assert len(maker.llm.calls) == 1


def test_chat_survives_a_refused_turn(type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    maker = Maker(pieces=[])
    type_lines("far too long", "again")
    assert cli.main(["chat", "m"], make_llm=maker) == 0
    assert capsys.readouterr().err == "jaxpaged: error: the conversation is too long: start a new one\n" * 2
