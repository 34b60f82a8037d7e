"""Executors are tested with the benches and running workers of the worker's tests."""

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
