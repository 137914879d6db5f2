"""Prefix cache: keys that cannot be confused, hits that are whole blocks and leave a token, entries that go in time."""

from __future__ import annotations

import random

import pytest

from jaxpaged.prefix_cache import HashChain, PrefixCache
from tests.support.scheduling import Loop, make_request, serve


def keys(prompt: list[int], cache_key: bytes = b"", block_size: int = 4) -> list[bytes]:
    request = make_request("r", prompt, cache_key=cache_key)
    return HashChain(cache_key, block_size).keys(request, len(prompt) // block_size)


def test_keys_tell_ids_256_apart() -> None:
    """A key made of the ids' low bytes took one prompt's KV for another's."""
    assert keys([65, 66, 67, 68]) != keys([321, 322, 323, 324])
    assert keys([1, 0, 0, 0]) != keys([2**16, 0, 0, 0]) != keys([2**32, 0, 0, 0])


def test_keys_depend_on_everything_before_and_on_the_cache_key() -> None:
    """The same middle block after different first blocks was taken to be the same."""
    one, other = keys([1, 2, 3, 4, 9, 9, 9, 9]), keys([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[0] != other[0] and one[1] != other[1]
    assert keys([1, 2, 3, 4])[0] == one[0]
    assert keys([1, 2, 3, 4], b"salt") != keys([1, 2, 3, 4])


def test_keys_are_kept_and_grow_with_the_outputs() -> None:
    request = make_request("r", [1, 2, 3, 4, 5, 6])
    chain = HashChain(b"", 4)
    first = chain.keys(request, 1)
    request.output_ids += [7, 8, 9]
    assert chain.keys(request, 2) == keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.keys(request, 1) == first
    with pytest.raises(AssertionError, match="not full"):
        chain.keys(request, 3)


def test_the_index_lists_a_block_under_one_key_and_forgets_it_at_once() -> None:
    cache = PrefixCache()
    a, b, c = keys([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    cache.insert(a, 3)
    cache.insert(b, 4)
    cache.insert(a, 5)  # equal content computed twice: the first stays
    assert cache.longest_prefix([a, b, c]) == [3, 4]
    assert cache.longest_prefix([b]) == [4]
    cache.forget([3, 5, 6])
    assert cache.longest_prefix([a, b]) == [] and cache.blocks == {4}
    with pytest.raises(AssertionError, match="another key"):
        cache.insert(c, 4)
    cache.check()
    cache.clear()
    assert len(cache) == 0


def test_a_fully_cached_prompt_of_whole_blocks_recomputes_its_last_block() -> None:
    """A prompt of a whole number of cached blocks left nothing to compute: no logits, or a zero-length call."""
    loop = Loop(max_num_batched_tokens=32)
    prompt = list(range(8))
    cached = [serve(loop, prompt, max_tokens=3)[0].num_cached for _ in range(3)]
    assert cached == [0, 4, 4]
    longer = [serve(loop, [*prompt, 60, 61, 62, 63], max_tokens=3)[0].num_cached for _ in range(2)]
    assert longer == [8, 8]


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)])
def test_hits_are_whole_blocks_and_leave_a_token(length: int, cached: int) -> None:
    loop = Loop()
    prompt = list(range(length))
    first, second = (serve(loop, prompt, max_tokens=2)[0] for _ in range(2))
    assert (first.num_cached, second.num_cached) == (0, cached)
    assert first.output_ids == second.output_ids


def test_outputs_are_found_too() -> None:
    """A second turn of a conversation starts with the first one's prompt and answer."""
    loop = Loop()
    (first,) = serve(loop, [1, 2, 3], max_tokens=10)
    # 13 tokens, of which the last was never computed: 12 are in whole blocks.
    (second,) = serve(loop, [1, 2, 3, *first.output_ids, 5], max_tokens=2)
    assert second.num_cached == 12


def test_equal_prompts_in_one_step_compute_their_own_blocks() -> None:
    """Two equal prompts admitted together: the second shared blocks that nobody had written yet."""
    loop = Loop(depth=1)
    p, q = list(range(9)), [9, 9, 9]
    requests = [loop.add(make_request(f"r{i}", prompt)) for i, prompt in enumerate([p, p, p, q])]
    plan = loop.schedule()
    assert plan is not None and [row.start for row in plan.rows] == [0, 0, 0, 0]
    assert loop.scheduler.stats.blocks_shared == 0
    # One step later, before any result is read, the blocks can be shared: the device runs in order.
    late = loop.add(make_request("late", p))
    plan = loop.schedule()
    assert plan is not None and late.num_cached == 8
    assert loop.scheduler.stats.blocks_shared == 2
    while loop.flight:
        loop.absorb()
    loop.finish()
    assert requests[0].output_ids == requests[1].output_ids == late.output_ids


def test_a_recycled_block_is_not_hit() -> None:
    """A block was handed to a new owner while the look-up table still listed its old content."""
    loop = Loop(num_blocks=6, max_num_seqs=1)
    p = list(range(9))
    assert serve(loop, p, max_tokens=2)[0].num_cached == 0
    assert serve(loop, p, max_tokens=2)[0].num_cached == 8
    for i in range(4):
        serve(loop, [50 + i] * 9, max_tokens=2)
    assert serve(loop, p, max_tokens=2)[0].num_cached == 0  # all of it was recycled
    assert serve(loop, [*p[:4], 9, 9, 9, 9, 9], max_tokens=2)[0].num_cached == 4


def test_blocks_in_use_are_never_recycled() -> None:
    loop = Loop(num_blocks=8, depth=1)
    keeper = loop.add(make_request("keeper", list(range(9)), max_tokens=3))
    loop.step()
    sharer = loop.add(make_request("sharer", [*range(8), 20, 21], max_tokens=12))
    loop.finish()
    assert sharer.num_cached == 8 and keeper.num_cached == 0


def test_reset_empties_the_cache_only_when_nothing_runs() -> None:
    loop = Loop(depth=1)
    request = loop.add(make_request("r", list(range(9)), max_tokens=4))
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    loop.finish()
    assert request.finished and loop.scheduler.reset_prefix_cache()
    assert serve(loop, list(range(9)))[0].num_cached == 0


def test_a_disabled_cache_never_hits() -> None:
    loop = Loop(enable_prefix_caching=False)
    for _ in range(2):
        assert serve(loop, list(range(9)))[0].num_cached == 0
    assert loop.scheduler.stats.prefix_queries == 0


def test_random_prompts_over_a_small_alphabet_never_see_foreign_blocks() -> None:
    """Cached and uncached runs answered differently; the device model checks every position of every row."""
    draw = random.Random(0)
    loop = Loop(num_blocks=40, block_size=2, max_num_batched_tokens=24, sample=lambda _: draw.randrange(5))
    for _ in range(60):
        prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 12))] for _ in range(5)]
        serve(loop, *prompts, max_tokens=4)
    assert loop.scheduler.stats.prefix_hits > 100
