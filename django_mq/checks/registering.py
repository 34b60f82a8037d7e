"""Register a check that takes the settings, and runs only once they are valid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_mq.conf import Settings, get_settings

TAG = "django_mq"

CheckMessages = Iterator[checks.CheckMessage]


def check(
    *tags: str, deploy: bool = False
) -> Callable[[Callable[[Settings, Collection[str]], CheckMessages]], object]:
    """Register a check that takes the settings and the databases that it may connect to.

    It does not run while the settings are invalid.
    """

    def register(function: Callable[[Settings, Collection[str]], CheckMessages]) -> object:
        def run(
            app_configs: object, databases: Collection[str] | None = None, **kwargs: Any
        ) -> list[checks.CheckMessage]:
            try:
                settings = get_settings()
            except ImproperlyConfigured:
                return []  # E001 reports the reason
            return list(function(settings, databases or ()))

        return checks.register(run, *tags, deploy=deploy)

    return register
