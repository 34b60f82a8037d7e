"""Register checks that run only once the settings are valid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_mq.conf import Settings, alias_of, get_settings, is_postgresql

TAG = "django_mq"

CheckMessages = Iterator[checks.CheckMessage]


def check(
    *tags: str, deploy: bool = False
) -> Callable[[Callable[[Settings], CheckMessages]], object]:
    """Register a check that takes the settings. It does not run while they are invalid."""

    def register(function: Callable[[Settings], CheckMessages]) -> object:
        def run(app_configs: object, **kwargs: Any) -> list[checks.CheckMessage]:
            try:
                settings = get_settings()
            except ImproperlyConfigured:
                return []  # E001 reports the reason
            return list(function(settings))

        return checks.register(run, *tags, deploy=deploy)

    return register


def database_check(function: Callable[[str], CheckMessages]) -> object:
    """Register a check that takes the alias of the messages, and may connect to it.

    It runs only with `--database`. Not tagged django_mq: from Django 6.1, running checks by tag
    connects to every database.
    """

    def run(
        app_configs: object, databases: Collection[str] | None = None, **kwargs: Any
    ) -> list[checks.CheckMessage]:
        try:
            alias = alias_of()
        except ImproperlyConfigured:
            return []  # E001 reports the reason
        return list(function(alias)) if alias in (databases or ()) and is_postgresql(alias) else []

    return checks.register(run, checks.Tags.database)
