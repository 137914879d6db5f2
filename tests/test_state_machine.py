"""Random walks through the scheduler, every plan run on a model that knows what each KV position holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.scheduler_walk import DEPTH, Walk, sampler

ALPHABET = st.integers(0, 1)  # two ids: common prefixes and equal prompts are the rule, not the exception

SMALLEST = {
    "num_blocks": 2,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "policy": "fcfs",
    "enable_prefix_caching": True,
}
SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 14),
        "block_size": st.integers(1, 4),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(2, 16),
        "max_model_len": st.integers(6, 40),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "max_num_read": st.integers(1, 8),
    }
)
ASKS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 16),
        "min_tokens": st.integers(0, 3),
        "priority": st.integers(0, 2),
        "cache_key": st.sampled_from([b"", b"", b"", b"salt"]),
        "reads": st.sampled_from([None, None, None, "prompt", "score", "embed"]),
    }
)


class Machine(RuleBasedStateMachine):
    """hypothesis chooses the walk."""

    counts: Counter

    def __init__(self) -> None:
        super().__init__()
        self.walk = Walk(SMALLEST, self.counts)

    @initialize(shape=SHAPES)
    def start(self, shape: dict) -> None:
        self.walk = Walk(shape, self.counts)

    @rule(prompt=st.lists(ALPHABET, min_size=1, max_size=12), asks=ASKS)
    def add(self, prompt: list[int], asks: dict) -> None:
        self.walk.add(prompt, asks, None)

    @rule(prompt=st.lists(ALPHABET, min_size=1, max_size=12), asks=ASKS, n=st.integers(2, 4))
    def add_family(self, prompt: list[int], asks: dict, n: int) -> None:
        asks["reads"] = asks["reads"] and "prompt"  # what generates nothing has no samples
        first = self.walk.add(prompt, asks, None)
        for _ in range(n - 1):
            self.walk.add(prompt, asks, first)

    @rule(prompt=st.lists(ALPHABET, min_size=1, max_size=12), asks=ASKS, width=st.integers(1, 5))
    def add_beams(self, prompt: list[int], asks: dict, width: int) -> None:
        self.walk.add_beams(prompt, asks, width)

    @precondition(lambda self: len(self.walk.flight) < DEPTH)
    @rule(seed=st.integers(0, 2**16))
    def schedule(self, seed: int) -> None:
        self.walk.schedule(sampler(seed))

    @precondition(lambda self: self.walk.flight)
    @rule()
    def absorb(self) -> None:
        self.walk.absorb()

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 8))
    def run(self, seed: int, steps: int) -> None:
        """Several steps at full depth, as the engine makes them."""
        sample = sampler(seed)
        for _ in range(steps):
            if len(self.walk.flight) == DEPTH or (not self.walk.schedule(sample) and self.walk.flight):
                self.walk.absorb()
            self.walk.check()

    @precondition(lambda self: self.walk.live)
    @rule(which=st.integers(0, 63), by_abort=st.booleans())
    def end(self, which: int, by_abort: bool) -> None:
        self.walk.end(self.walk.live[which % len(self.walk.live)], by_abort)

    @precondition(lambda self: self.walk.live)
    @rule(which=st.integers(0, 63), priority=st.integers(0, 2))
    def set_priority(self, which: int, priority: int) -> None:
        self.walk.scheduler.set_priority(self.walk.live[which % len(self.walk.live)].request_id, priority)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.walk.scheduler.reset_prefix_cache() == (self.walk.scheduler.num_running == 0)

    @precondition(lambda self: self.walk.live)
    @rule(certain=st.sampled_from([False, False, False, True]))
    def restart(self, certain: bool) -> None:
        if certain:  # not too often: it clears what the other rules build up
            self.walk.restart()

    @invariant()
    def consistent(self) -> None:
        self.walk.check()

    def teardown(self) -> None:
        self.walk.drain(sampler(0))


def test_no_walk_breaks_a_block() -> None:
    """Blocks were leaked, owned twice, shared wrongly, reused too early or hit falsely in rare interleavings."""
    counts: Counter = Counter()
    machine = type("CountedMachine", (Machine,), {"counts": counts})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    assert counts["schedule"] + counts["absorb"] >= 10_000
    # The walk must have gone where the faults are.
    places = ("preempted", "copies", "on_device", "ended", "forked", "forked_without_slot", "dropped", "restarted")
    assert min(counts[place] for place in places) >= 100


@pytest.mark.parametrize("seed", range(4))
def test_no_long_run_breaks_a_block(seed: int) -> None:
    """As above under steady load: hundreds of steps on one pool, so that every block is recycled many times."""
    draw = random.Random(seed)
    counts: Counter = Counter()
    shape = {
        "num_blocks": draw.randint(12, 24),
        "block_size": draw.choice([2, 3, 4]),
        "max_num_seqs": 6,
        "max_num_batched_tokens": draw.choice([6, 12, 24]),
        "max_model_len": 40,
        "policy": ("fcfs", "priority")[seed % 2],
        "enable_prefix_caching": True,
        "max_num_read": 3,
    }
    walk = Walk(shape, counts)
    sample = sampler(seed)
    for _ in range(500):
        if len(walk.live) < 10:
            prompt = draw.choices([0, 1], k=draw.randint(1, 14))
            asks = {
                "max_tokens": draw.randint(1, 20),
                "min_tokens": 0,
                "priority": draw.randint(0, 2),
                "cache_key": b"",
                "reads": draw.choice([None, None, None, "prompt"]),
            }
            if draw.random() < 0.2:
                walk.add_beams(prompt, asks, draw.randint(1, 6))
                continue
            first = walk.add(prompt, asks, None)
            for _ in range(draw.choice([0, 0, 0, 2])):
                walk.add(prompt, asks, first)
        if walk.live and draw.random() < 0.03:
            walk.end(draw.choice(walk.live), draw.random() < 0.5)
        if draw.random() < 0.01:
            walk.restart()
        if len(walk.flight) == DEPTH or (not walk.schedule(sample) and walk.flight):
            walk.absorb()
        walk.check()
    walk.drain(sample)
    assert min(counts["preempted"], counts["copies"], counts["forked"], counts["dropped"]) > 0
    assert walk.scheduler.stats.prefix_hits > 0
