"""A module whose extra is not installed says which command installs it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package"),
    [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")],
)
def test_it_names_the_extra(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"django_mq.contrib.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'django-mq\[{module}\]'"):
        importlib.import_module(f"django_mq.contrib.{module}")
