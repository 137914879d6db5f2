"""Beams in the scheduler: what is shared, what is copied and when, block by block."""

from __future__ import annotations

import pytest

from jaxpaged.request import FinishReason, Request
from tests.support.scheduling import Loop, make_request


def root_of(loop: Loop, length: int) -> Request:
    """A search's first beam, its prompt computed and answered."""
    root = loop.add(make_request("search", range(length), lockstep=True))
    loop.step()
    while loop.flight:
        loop.absorb()
    assert root.answer is not None
    return root


def split(loop: Loop, parent: Request, count: int, name: str) -> list[Request]:
    """The parent goes on with token 1, its forks with the tokens after that."""
    forks = []
    for token in range(2, count + 1):
        child = parent.forked(f"{name}{token}", token)
        loop.scheduler.fork(parent, child)
        loop.device.fork(parent, child)
        forks.append(child)
    loop.scheduler.extend(parent, 1)
    loop.device.extend(parent, 1)
    return [parent, *forks]


def step(loop: Loop) -> int:
    """One step of all beams, read at once: the block copies it made."""
    plan = loop.schedule()
    assert plan is not None
    while loop.flight:
        loop.absorb()
    return len(plan.copies)


def end(loop: Loop, beams: list[Request]) -> None:
    for beam in beams:
        loop.scheduler.finish(beam, FinishReason.ABORT, None)
        loop.device.leave(beam)
    assert loop.scheduler.stats.blocks_used == 0
    loop.scheduler.check()


# Blocks of 4: a prompt of 6 fills one and a half. Four beams share both until they write; three copy the half-filled
# one, and the last writer is alone with it. After a prompt of 8 each takes a fresh block, after one of 3 the only one.
@pytest.mark.parametrize(("length", "copies", "blocks"), [(6, 3, 1 + 4), (8, 0, 2 + 4), (3, 3, 4), (9, 3, 2 + 4)])
def test_a_split_copies_only_what_is_written(length: int, copies: int, blocks: int) -> None:
    """Every fork copied its whole sequence, or two wrote to one block."""
    loop = Loop(enable_prefix_caching=False)
    root = root_of(loop, length)
    held = loop.scheduler.stats.blocks_used
    beams = split(loop, root, 4, "a")
    stats = loop.scheduler.stats
    assert (stats.blocks_used, stats.blocks_shared) == (held, held), "a fork costs no block until it writes"
    assert step(loop) == copies
    stats = loop.scheduler.stats
    assert (stats.blocks_used, stats.blocks_shared) == (blocks, length // 4)
    end(loop, beams)


def test_generations_share_what_they_descend_from() -> None:
    """A grandchild's blocks are its parent's, whose other copies are freed with the beams that are dropped."""
    loop = Loop(enable_prefix_caching=False)
    beams = split(loop, root_of(loop, 6), 3, "a")
    assert step(loop) == 2
    chosen, dropped = beams[1], [beams[0], beams[2]]
    for beam in dropped:
        loop.scheduler.finish(beam, FinishReason.ABORT, None)
        loop.device.leave(beam)
    assert loop.scheduler.stats.blocks_used == 2, "the blocks of a dropped beam are free at once"
    beams = split(loop, chosen, 3, "b")  # 7 tokens are computed: the 8th goes to the second block
    assert step(loop) == 2
    assert loop.scheduler.stats.blocks_used == 1 + 3
    for name in "cd":  # the 9th token begins a block of its own; the 10th is written by beams that share nothing
        for beam in beams:
            split(loop, beam, 1, name)
        assert step(loop) == 0
    assert loop.scheduler.stats.blocks_used == 1 + 3 * 2
    end(loop, beams)


def test_the_last_holder_writes_in_place() -> None:
    """A fork that ends before its first step leaves nothing to copy."""
    loop = Loop(enable_prefix_caching=False)
    parent, child = split(loop, root_of(loop, 6), 2, "a")
    loop.scheduler.finish(child, FinishReason.ABORT, None)
    loop.device.leave(child)
    assert step(loop) == 0
    end(loop, [parent])
