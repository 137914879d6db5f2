"""Unknown keyword arguments: refused with the nearest known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def reject_unknown_keywords(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a name in `given` is not in `known`, naming near matches (or all known names).

    Example: reject_unknown_keywords("SamplingParams", ["topk"], ["top_k", "top_p"]) raises
    "SamplingParams got an unknown keyword 'topk'; did you mean 'top_k', 'top_p'?".
    """
    known = sorted(known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        if near:
            hint = "did you mean " + ", ".join(map(repr, near)) + "?"
        else:
            hint = "known keywords: " + ", ".join(known)
        raise TypeError(f"{owner} got an unknown keyword {name!r}; {hint}")
