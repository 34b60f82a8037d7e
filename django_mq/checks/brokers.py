"""Packages that relays and inboxes need."""

from __future__ import annotations

from collections.abc import Collection

from django.core import checks

from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings
from django_mq.conf.broker_options import missing_package


@check(TAG)
def check_packages(settings: Settings, databases: Collection[str]) -> CheckMessages:
    """E007: the package for a kind of broker is not installed."""
    brokers = [(f"['RELAYS'][{name!r}]", each.kind) for name, each in settings.relays.items()]
    brokers += [(f"['INBOXES'][{name!r}]", each.kind) for name, each in settings.inboxes.items()]
    for where, kind in brokers:
        if missing := missing_package(kind):
            yield checks.Error(
                f"DJANGO_MQ{where} is of the kind {kind!r}, and {missing}.", id="django_mq.E007"
            )
