"""The two benchmark workloads, the same for every engine: token ids in, a fixed number of greedy tokens out.

W1: 64 requests, all there at the start: prompts of 16 to 256 tokens, outputs of 16 to 128 (throughput).
W2: one request, 64 prompt tokens and 128 output tokens (latency of a single stream).
End-of-sequence tokens are ignored, so that every engine does the same work.

    python -m scripts.workload --tokenizer DIR/tokenizer.json --out workload.json
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers

W1_REQUESTS = 64
W1_PROMPT = (16, 256)  # tokens, both ends included
W1_OUTPUT = (16, 128)
W2_PROMPT = 64
W2_OUTPUT = 128

_WORDS = """
anchor autumn basket beacon bicycle blanket bottle branch bucket butter button cabin candle canvas carpet cellar chalk
chimney clay clock cloud coast copper corner cotton cradle curtain dawn dust echo engine fabric feather fence ferry
field flame flock flute fog forge fountain frost garden gate glass grain granite harbour harvest hill honey horizon
ink island ivory jar kettle kitchen ladder lamp lantern leather letter lever library lighthouse linen lock loom map
marble market meadow melody mill mirror mist needle nest oak oar orchard paper path pebble pepper pillow pocket pond
porch quarry quilt rain reed ribbon ridge river road roof rope saddle sail salt sand saw scale shadow shelf shell
shore silk silver slate smoke snow soap spade spoon spring stair steam stone storm straw string sugar table thread
tide timber tower track trunk tunnel umbrella valley velvet village wagon wall water wheat wheel willow window winter
wool yard amber brave calm careful clever crooked distant early eager empty faint gentle golden heavy hollow idle
late loose narrow patient plain proud quiet rough rusty sharp silent slow smooth steady strange sudden tall tired
warm wild answers asks begins bends borrows breaks brings builds carries catches climbs closes counts crosses digs
draws drifts falls fills finds folds follows gathers gives grows hides holds keeps knocks leans leaves lifts listens
mends moves notices offers opens paints passes plants pours pulls reaches reads repairs returns rises sails sees
sends sews shines sings sits sleeps stands starts stops sweeps swims tells throws ties turns waits wakes walks
watches wonders works writes across after against along among and around because before behind beneath beside but
by down during every few for from here in into its many near never no nothing of often on only or other over past
""".split()


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompt token ids, taken as they are (no special tokens added), and the number of tokens to generate."""

    prompt_ids: list[int]
    out_len: int


def make_workloads(encode: Callable[[str], Sequence[int]], *, seed: int) -> dict[str, list[Request]]:
    """W1 and W2. encode turns text into token ids without special tokens; lengths depend on the seed alone."""
    lengths, words = random.Random(seed), random.Random(f"words {seed}")
    sizes = [(lengths.randint(*W1_PROMPT), lengths.randint(*W1_OUTPUT)) for _ in range(W1_REQUESTS)]
    return {
        "W1": [Request(prompt_ids=_prompt(encode, words, prompt), out_len=output) for prompt, output in sizes],
        "W2": [Request(prompt_ids=_prompt(encode, words, W2_PROMPT), out_len=W2_OUTPUT)],
    }


def _prompt(encode: Callable[[str], Sequence[int]], words: random.Random, length: int) -> list[int]:
    """The first `length` tokens of random words: each word gives at least one token."""
    ids = encode(" ".join(words.choice(_WORDS) for _ in range(length)))
    if len(ids) < length:
        raise ValueError(f"wanted a tokenizer that gives a token or more for each of {length} words, got {len(ids)}")
    return list(ids[:length])


def workloads_of(tokenizer_file: Path, *, seed: int) -> dict[str, list[Request]]:
    """The workloads in the vocabulary of a tokenizer.json."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    return make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    workloads = workloads_of(options.tokenizer, seed=options.seed)
    as_json = {name: [asdict(request) for request in requests] for name, requests in workloads.items()}
    options.out.write_text(json.dumps(as_json))
    for name, requests in workloads.items():
        prompt = sum(len(request.prompt_ids) for request in requests)
        output = sum(request.out_len for request in requests)
        print(f"{name}: {len(requests)} requests, {prompt} prompt tokens, {output} output tokens")


if __name__ == "__main__":
    main()
