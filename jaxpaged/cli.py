"""The command line: jaxpaged demo, generate, chat and graphs.

Options of the engine are EngineConfig's fields, spelled with dashes. Errors are one line, exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import logging
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence

from jaxpaged import graphs_cli
from jaxpaged.config import EngineConfig
from jaxpaged.demo import DEMO_MODEL
from jaxpaged.sampling_params import SamplingParams

if typing.TYPE_CHECKING:
    from jaxpaged.llm import LLM
    from jaxpaged.outputs import RequestOutput

MakeLLM = Callable[..., "LLM"]

# Given elsewhere: the model is a positional argument; a token on a command line would show in process lists.
NOT_OPTIONS = ("model", "hf_token")

# One long system prompt in front of every question: its KV blocks are computed once and shared.
DEMO_SYSTEM = (
    "You are a guide in a small museum of natural history at the edge of a town by the sea. Visitors of every age "
    "come to you with questions about animals, plants, stones, the weather and the stars. You answer in two or three "
    "short, friendly sentences, you say only what you are sure of, and you never make a visitor feel foolish for "
    "asking. When a question has a number for an answer you give the number first. You do not use lists."
)
DEMO_QUESTIONS = (
    "Why is the sky blue?",
    "How do birds find their way when they migrate?",
    "What is the largest animal that has ever lived?",
    "Why does the sea taste of salt?",
    "How old is the Earth?",
    "What do bees do in winter?",
    "Why do leaves turn red in autumn?",
    "What is a fossil?",
)


def main(argv: Sequence[str] | None = None, *, make_llm: MakeLLM | None = None) -> int:
    """Run one command and return its exit code: 0, 2 after an error, 130 after Ctrl-C.

    argv: the arguments, sys.argv's by default. make_llm(model, **engine options) builds the engine, LLM by default.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        options = {name: value for name, value in vars(args).items() if name in engine_fields()}
        EngineConfig.create(args.model, **options)  # bad options are told before anything is fetched or loaded
        with contextlib.ExitStack() as stack:
            make = make_llm or _make_llm
            return args.run(args, lambda: stack.enter_context(contextlib.closing(make(args.model, **options))))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"jaxpaged: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _make_llm(model: str, **options: object) -> LLM:
    from jaxpaged.llm import LLM  # takes a second: not for --help

    return LLM(model, **options)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- commands


def _demo(args: argparse.Namespace, load: Callable[[], LLM]) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    llm = load()
    conversations = [
        [{"role": "system", "content": DEMO_SYSTEM}, {"role": "user", "content": question}]
        for question in DEMO_QUESTIONS
    ]
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=True)
    seconds = time.perf_counter() - start
    for question, output in zip(DEMO_QUESTIONS, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text.strip()}")
    stats = llm.stats()
    print(f"\n{_summary(outputs, seconds)}")
    print(f"KV blocks at the peak: {stats['blocks_used_peak']} used, {stats['blocks_shared_peak']} of them shared")
    return 0


def _generate(args: argparse.Namespace, load: Callable[[], LLM]) -> int:
    params = _sampling_params(args)
    llm = load()
    start = time.perf_counter()
    outputs = llm.generate(args.prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    if len(outputs) == 1 and args.n == 1:
        print(outputs[0].outputs[0].text)
    else:
        for prompt, output in zip(args.prompts, outputs, strict=True):
            for completion in output.outputs:
                print(f"> {prompt}\n{completion.text}\n")
    print(_summary(outputs, seconds), file=sys.stderr)
    return 0


def _summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return f"{len(outputs)} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s"


def _chat(args: argparse.Namespace, load: Callable[[], LLM]) -> int:
    """Read, answer, repeat. Ctrl-C stops an answer, and leaves at the prompt or when pressed twice; Ctrl-D leaves."""
    params = _sampling_params(args)
    llm = load()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not question:
            continue
        turn = {"role": "user", "content": question}
        try:
            answer = _answer(llm, [*messages, turn], params)
        except ValueError as error:  # such as a conversation that has outgrown the model: the session goes on
            print(f"jaxpaged: error: {_one_line(error)}", file=sys.stderr)
            continue
        messages += [turn, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to the terminal; what there is of it when Ctrl-C stops it."""
    pieces = []
    with _first_interrupt() as interrupted, contextlib.closing(llm.generate_stream(messages, params)) as stream:
        for output in stream:
            pieces.append(output.outputs[0].text)
            print(pieces[-1], end="", flush=True)
            if interrupted.is_set():
                break
    print(" [stopped]" if interrupted.is_set() else "")
    return "".join(pieces)


@contextlib.contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event once, so that no engine step is torn in two; the next Ctrl-C raises KeyboardInterrupt."""
    pressed = threading.Event()

    def on_interrupt(signum: int, frame: types.FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        # None: the handler was not Python's, and cannot be put back.
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)


def _graphs(args: argparse.Namespace, load: Callable[[], LLM]) -> int:
    del load  # no engine is made
    return graphs_cli.run(args, {name: value for name, value in vars(args).items() if name in engine_fields()})


# --- arguments


class _Parser(argparse.ArgumentParser):
    """Tells an error in one line: the usage of fifty options would push it off the screen."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxpaged", description="Paged, continuously batched LLM inference on JAX.")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("jaxpaged"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", usage="%(prog)s [options]", help="fetch the demo model and answer several questions at once"
    )
    demo.set_defaults(run=_demo, model=DEMO_MODEL)
    demo.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: %(default)s)")

    generate = commands.add_parser(
        "generate", usage="%(prog)s MODEL PROMPT ... [options]", help="continue one or more prompts"
    )
    generate.set_defaults(run=_generate)
    _add_model(generate)
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--n", type=int, default=1, help="samples per prompt (default: %(default)s)")
    _add_sampling(generate, max_tokens=128)

    chat = commands.add_parser(
        "chat", usage="%(prog)s MODEL [options]", help="talk with a model: Ctrl-C stops an answer, Ctrl-D leaves"
    )
    chat.set_defaults(run=_chat)
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling(chat, max_tokens=None)

    graphs = commands.add_parser(
        "graphs", usage="%(prog)s MODEL [options]", help="compile a model's programs for a GPU that need not be there"
    )
    graphs.set_defaults(run=_graphs)
    _add_model(graphs)
    graphs_cli.add_arguments(graphs)

    for command in (demo, generate, chat, graphs):
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
        _add_engine(command)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f'directory, .gguf file, Hugging Face id, or "{DEMO_MODEL}"')


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Options named as SamplingParams' fields; those not given are left to SamplingParams."""
    group = parser.add_argument_group("sampling")
    limit = "the model's limit" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"longest output (default: {limit})")
    group.add_argument("--temperature", type=float, default=argparse.SUPPRESS, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=argparse.SUPPRESS)
    group.add_argument("--top-k", type=int, default=argparse.SUPPRESS)
    group.add_argument("--min-p", type=float, default=argparse.SUPPRESS)
    group.add_argument("--min-tokens", type=int, default=argparse.SUPPRESS)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = {field.name for field in dataclasses.fields(SamplingParams)} - set(engine_fields())
    return SamplingParams(**{name: value for name, value in vars(args).items() if name in names})


def engine_fields() -> dict[str, dataclasses.Field[typing.Any]]:
    """EngineConfig's fields that are options of the command line, by name."""
    return {field.name: field for field in dataclasses.fields(EngineConfig) if field.name not in NOT_OPTIONS}


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """One option per field of EngineConfig; those not given are left to EngineConfig."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig)
    for name, field in engine_fields().items():
        flag = "--" + name.replace("_", "-")
        text = None if field.default is None else f"default: {field.default}"
        kind = _scalar(hints[name])
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=text)


def _scalar(hint: object) -> type:
    """The type of an annotation once None is taken away: int for `int | None`."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not types.NoneType]
    assert len(kinds) == 1 and isinstance(kinds[0], type), f"no command line option for the annotation {hint}"
    return kinds[0]
