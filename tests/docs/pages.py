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
    """Yield the module that the page's Python snippets make; `names` exist before the first.

    `modules` are importable in the block, beside `shop` and `shop.models`. What the page registers
    is gone after the block.
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
    """Return a module that stands for one of a package that is not installed."""
    module = ModuleType(name)
    vars(module).update(names)
    return module


def passes(case: type[unittest.TestCase]) -> int:
    """Run a test case of a page; return how many tests passed, and fail if one did not.

    Once in a test: Django closes the connection at the end of the case.
    """
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert not result.failures, result.failures
    assert not result.errors, result.errors
    return result.testsRun
