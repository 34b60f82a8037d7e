"""System checks: find wrong or unwise settings before a worker starts.

All run with `manage.py check --database ALIAS`; checks that need no connection also run with `--tag
django_mq`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_mq.checks import databases, message_classes, misspelt  # noqa: F401  (they register)
from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings, find_errors
from django_mq.conf.broker_options import missing_package
from django_mq.handlers import all_handlers, allowed_queues
from django_mq.handlers.periodic import problems

#: A lease is renewed after a third of its length; a slice that lasts longer misses a renewal.
RENEWALS = 3


@checks.register(TAG)
def check_settings(app_configs: object, **kwargs: Any) -> list[checks.CheckMessage]:
    """E001: an unknown or invalid setting."""
    return [
        checks.Error(f"{error.where} {error.problem}", hint=error.hint, id="django_mq.E001")
        for error in find_errors(getattr(django_settings, "DJANGO_MQ", {}))
    ]


@check(TAG)
def check_packages(settings: Settings) -> CheckMessages:
    """E007: the package for a kind of broker is not installed."""
    brokers = [(f"['RELAYS'][{name!r}]", each.kind) for name, each in settings.relays.items()]
    brokers += [(f"['INBOXES'][{name!r}]", each.kind) for name, each in settings.inboxes.items()]
    for where, kind in brokers:
        if missing := missing_package(kind):
            yield checks.Error(
                f"DJANGO_MQ{where} is of the kind {kind!r}, and {missing}.", id="django_mq.E007"
            )


@check(TAG)
def check_encoder(settings: Settings) -> CheckMessages:
    """E008: ENCODER cannot be imported or is not an encoder class."""
    try:
        settings.encoder_class  # noqa: B018  (the property imports it)
    except ImproperlyConfigured as error:
        hint = "Set ENCODER to the dotted path of a JSONEncoder class."
        yield checks.Error(str(error), hint=hint, id="django_mq.E008")


@check(TAG)
def check_schedules(settings: Settings) -> CheckMessages:
    """E010: a declared schedule that cannot run."""
    for name, problem in problems(settings):
        yield checks.Error(
            f"The schedule {name!r} cannot run: {problem}.",
            hint="Correct its periodic(...) or @handler(..., cron=...) in handlers.py.",
            id="django_mq.E010",
        )


@check(TAG)
def check_handlers(settings: Settings) -> CheckMessages:
    """W003: atomic and non-atomic handlers share a queue."""
    names: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for handler in all_handlers():
        if not handler.patterns:
            continue  # a task: the code that enqueues it chooses the queue
        for queue in allowed_queues(handler, settings):
            names[queue][handler.atomic].append(handler.name)
    for queue, by_mode in sorted(names.items()):
        if by_mode[True] and by_mode[False]:
            yield checks.Warning(
                f"The queue {queue!r} has both atomic handlers ({', '.join(by_mode[True])}) and"
                f" non-atomic ones ({', '.join(by_mode[False])}), which slow each other down.",
                hint="Move the non-atomic handlers to a queue of their own:"
                " @handler(..., queue=...).",
                id="django_mq.W003",
            )


@check(TAG, checks.Tags.security, deploy=True)
def check_deployment(settings: Settings) -> CheckMessages:
    """W005: rows are kept for ever, or payloads are shown in full. W011: retries without a wait."""
    for name in ("result_retention", "attempt_retention"):
        if getattr(settings, name) is None:
            yield checks.Warning(
                f"{name.upper()} is None, so its table grows without bound.",
                hint="Set a duration, or delete old rows yourself and silence this check.",
                id="django_mq.W005",
            )
    if settings.redact is None:
        yield checks.Warning(
            "REDACT is None, so every user who may view payloads sees the secrets in them.",
            hint="Remove REDACT to hide the keys that Django hides, or set a pattern of your own.",
            id="django_mq.W005",
        )
    if settings.retry_floor == 0:
        yield checks.Warning(
            "RETRY_FLOOR is 0, so a failing message whose policy does not wait runs in a tight"
            " loop, and logs as fast.",
            hint="Remove RETRY_FLOOR, or set the shortest wait that you can bear, such as 0.01.",
            id="django_mq.W011",
        )


@check(TAG)
def check_slice(settings: Settings) -> CheckMessages:
    """W006: slices are too long for the lease."""
    leases = {"LEASE": settings.lease}
    for name, each in settings.queues.items():
        if each.lease != settings.lease:
            leases[f"QUEUES[{name!r}]['lease']"] = each.lease
    for where, lease in leases.items():
        if settings.slice_seconds * RENEWALS > lease:
            yield checks.Warning(
                f"SLICE_SECONDS ({settings.slice_seconds:g} s) is too long for {where}"
                f" ({lease:g} s): a slice may outlast a renewal of the lease.",
                hint=f"Set SLICE_SECONDS to a third of the lease or less: {lease / RENEWALS:g} s.",
                id="django_mq.W006",
            )
