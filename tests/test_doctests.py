"""The examples in the package's docstrings hold."""

import doctest
import importlib
from pathlib import Path

import pytest

import django_mq

ROOT = Path(django_mq.__file__).parent.parent

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "django_mq").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
