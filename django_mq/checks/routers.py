"""A database router that separates the tables of django_mq from the messages."""

from __future__ import annotations

from collections import defaultdict

from django.apps import apps
from django.core import checks
from django.db import connections, router

from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings, alias_of


@check(TAG)
def check_router(settings: Settings) -> CheckMessages:
    """E009: the router sends some of our tables to another database than the messages."""
    elsewhere: dict[str, list[str]] = defaultdict(list)
    for model in apps.get_app_config("django_mq").get_models():
        elsewhere[router.db_for_write(model)].append(model.__name__)
    home = alias_of()
    elsewhere.pop(home, None)
    for alias, models in sorted(elsewhere.items()):
        yield checks.Error(
            f"The database router writes {', '.join(models)} to {alias!r},"
            f" but messages are stored in {home!r}.",
            hint="Route the whole app django_mq to one alias, and set DATABASE to that alias or"
            " None.",
            id="django_mq.E009",
        )


@check(TAG)
def check_migrations(settings: Settings) -> CheckMessages:
    """E009: the router lets some of our tables be created in other databases only.

    Aliases with the same NAME count as one database: migrations may run past a pooler. No error if
    no alias allows the migrations, since they may be run by another project.
    """
    home = alias_of()
    if home not in connections:
        return  # E002
    elsewhere: dict[str, list[str]] = defaultdict(list)
    for model in apps.get_app_config("django_mq").get_models():
        created = [alias for alias in connections if router.allow_migrate_model(alias, model)]
        names = {connections.settings[alias]["NAME"] for alias in created}
        if connections.settings[home]["NAME"] not in names:
            for alias in created:
                elsewhere[alias].append(model.__name__)
    for alias, models in sorted(elsewhere.items()):
        yield checks.Error(
            f"The database router lets the tables of {', '.join(models)} be created in {alias!r},"
            f" but not in {home!r}, where messages are stored.",
            hint=f"Let its allow_migrate() return True or None for django_mq in {home!r}, or set"
            f" DATABASE to {alias!r}.",
            id="django_mq.E009",
        )
