"""The prompts of the golden outputs: short and long, prose, code, languages, numbers, emoji, chat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A named prompt, described by either text or chat.

    text is encoded as it stands (no special tokens added); chat goes through the model's template with the
    generation prompt; max_tokens, where given, cuts the encoded prompt.
    """

    name: str
    text: str | None = None
    chat: tuple[tuple[str, str], ...] | None = None  # (role, content)
    max_tokens: int | None = None


_LETTER = """Dear Anna, the harbour looked different this morning. The fishermen had moved their boats to the other
side of the pier, because the wind had turned during the night and the old wall no longer gave them shelter. I
walked as far as the lighthouse and counted eleven ships waiting for the tide. """

_REPORT = """Section {n}. In year {y} the workshop repaired {a} clocks and {b} watches. The average repair took {c}
days; the longest one, a church clock from 1{n:03d}, took {d} days because a gear had to be cut by hand. Two
apprentices finished their training and one of them stayed. Costs rose by {c} percent, mostly for brass.
"""


def _report(sections: int) -> str:
    return "".join(
        _REPORT.format(n=n, y=1900 + 3 * n, a=17 * n % 101, b=29 * n % 97, c=2 + n % 7, d=11 + 5 * n % 23)
        for n in range(1, sections + 1)
    )


_PYTHON = '''def binary_search(items, wanted):
    """Return the index of wanted in the sorted list items, or None."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
'''

_C = """#include <stdio.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        printf("%d: %s\\n", i, argv[i]);
    }
"""

_JSON = '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [{"title": "Notes", "year": 184'

_TABLE = """| city | country | people (millions) |
|---|---|---|
| Tokyo | Japan | 37.4 |
| Delhi | India | 28.5 |
| Shanghai |"""


def golden_prompts() -> tuple[Prompt, ...]:
    """All prompts, in the order in which the golden file lists them."""
    return (
        Prompt(name="one-token", text="The"),
        Prompt(name="two-tokens", text="Once upon"),
        Prompt(name="capital", text="The capital of France is"),
        Prompt(name="story", text="Once upon a time, in a small village by the sea, there lived an old clockmaker who"),
        Prompt(name="list", text="Three things to remember when you plant a tree:\n1."),
        Prompt(name="question", text="Question: Why is the sky blue?\nAnswer:"),
        Prompt(name="definition", text="Photosynthesis is the process by which"),
        Prompt(name="dialogue", text='"Where did you put the map?" she asked.\n"'),
        Prompt(name="python", text=_PYTHON),
        Prompt(name="c", text=_C),
        Prompt(name="sql", text="-- customers without an order in 2023\nSELECT c.name FROM customers c LEFT JOIN"),
        Prompt(name="json", text=_JSON),
        Prompt(name="html", text='<ul class="menu">\n  <li><a href="/">Home</a></li>\n  <li><a href="/about">'),
        Prompt(name="shell", text="$ ls -la | sort -k5 -n | tail -3\n"),
        Prompt(name="counting", text="1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"),
        Prompt(name="arithmetic", text="12 + 30 = 42\n25 + 17 = 42\n19 + 23 = 42\n100 - 58 ="),
        Prompt(name="digits", text="3.14159265358979323846264338327950288419716939937510"),
        Prompt(name="table", text=_TABLE),
        Prompt(name="french", text="Le petit chat est assis sur la chaise et regarde par la fenêtre parce que"),
        Prompt(name="german", text="Die Straßenbahn fährt täglich um halb sieben über die große Brücke, und"),
        Prompt(name="spanish", text="¿Cómo se llama la montaña más alta de América del Sur? Se llama"),
        Prompt(name="russian", text="Москва — столица России, а Париж —"),
        Prompt(name="chinese", text="今天天气很好,我们去公园"),
        Prompt(name="arabic", text="اللغة العربية جميلة"),
        Prompt(name="emoji", text="I love pizza 🍕 and ice cream 🍦! My mood today: 😀👍🏽 👨‍👩‍👧‍👦"),
        Prompt(name="spaces", text="   \t  indented\n\n\n      twice   and\ttabs  "),
        Prompt(name="newline", text="\n"),
        Prompt(name="chat-short", chat=(("user", "What is 2 + 2?"),)),
        Prompt(
            name="chat-system",
            chat=(("system", "You answer in one sentence."), ("user", "Explain gravity to a child.")),
        ),
        Prompt(
            name="chat-turns",
            chat=(
                ("user", "Name a fruit."),
                ("assistant", "Apple."),
                ("user", "Another one, please, and write a short poem about it."),
            ),
        ),
        Prompt(name="letter-255", text=_LETTER * 6, max_tokens=255),
        Prompt(name="letter-256", text=_LETTER * 6, max_tokens=256),
        Prompt(name="letter-257", text=_LETTER * 6, max_tokens=257),
        Prompt(name="report-512", text=_report(12), max_tokens=512),
        Prompt(name="report-700", text=_report(12), max_tokens=700),
        Prompt(name="repeat-64", text="yes no " * 40, max_tokens=64),
    )
