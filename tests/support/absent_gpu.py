"""For tests that compile for a GPU that is absent."""

from __future__ import annotations

import pytest

from jaxpaged.graphs import CompilerMissing
from jaxpaged.graphs.toolchain import find_toolchain


def require_compiler() -> None:
    """Skip the test where the wheels are missing; `make test` brings them."""
    try:
        find_toolchain()
    except CompilerMissing as missing:
        pytest.skip(str(missing))
