"""Run the snippets of a page in order, as one module that imports a shop."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest

from django_mq.handlers import isolated
from django_mq.messages.classes import isolated as isolated_classes
from tests.test_docs import ROOT, snippets

DOCS = ROOT / "docs"


@contextmanager
def story(page: str, modules: dict[str, Any] | None = None, **names: Any) -> Iterator[Any]:
    """Yield the module made of the page's Python snippets; `names` exist before the first.

    Inside the block, `modules` can be imported, beside `shop` and `shop.models`. The page's
    registrations are removed after the block.
    """
    module = ModuleType(page.removesuffix(".md").replace("/", "_").replace("-", "_"))
    vars(module).update(names)
    shop = {"shop": "testproject.shop", "shop.models": "testproject.shop.models"}
    known = {name: sys.modules[real] for name, real in shop.items()} | (modules or {})
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(isolated())
        stack.enter_context(isolated_classes())
        for name, each in {**known, module.__name__: module}.items():
            patch.setitem(sys.modules, name, each)
        for code in snippets(DOCS / page, "python"):
            exec(compile(code, page, "exec", dont_inherit=True), vars(module))  # noqa: S102
        yield module


def namespace(name: str, **names: Any) -> ModuleType:
    """Return a module that stands in for one of a package that is not installed."""
    module = ModuleType(name)
    vars(module).update(names)
    return module


def passes(case: type[unittest.TestCase]) -> int:
    """Run a test case of a page; return the number of passed tests, and fail if one failed.

    Run it once per test: Django closes the connection at the end of the case.
    """
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert not result.failures, result.failures
    assert not result.errors, result.errors
    return result.testsRun
