"""What a beam search may be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpaged import BeamSearchParams


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.7}, "temperature must be 0"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"stop": [""]}, "stop"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_parameters(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **options})


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams(beam_widht=2, max_tokens=4)
