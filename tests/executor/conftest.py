"""Executors are tested with the benches and running workers of the worker's tests."""

import gc
from collections.abc import Iterator

import pytest

from tests.worker.conftest import (  # noqa: F401  (fixtures)
    bench,
    gate,
    make_bench,
    never_stuck,
    other,
    proxy,
    registry,
    said,
    start,
)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect the coroutines that a drain gave up, whose end is logged, before another test."""
    yield
    gc.collect()
