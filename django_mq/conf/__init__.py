"""Read settings.DJANGO_MQ into frozen, checked `Settings`. docs/reference.md explains each setting.

A setting is one line: its reader and its default. Readers turn durations into seconds.
"""
# ruff: noqa: RUF009  (`option` is `dataclasses.field`)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from json import JSONEncoder
from types import MappingProxyType
from typing import Literal

from django.apps import apps
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections, router
from django.utils.module_loading import import_string

from django_mq.conf import readers
from django_mq.conf.inboxes import Inbox, read_inboxes
from django_mq.conf.readers import (
    SettingError,
    duration,
    flag,
    hint_of,
    integer,
    one_of,
    option,
    optional,
    read_fields,
)
from django_mq.conf.relays import Destination, read_destinations
from django_mq.exceptions import InvalidOption
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.encoding import encode
from django_mq.values import short_repr

DAY = 86400.0
#: Deeper JSON comes close to the recursion limit of Python's own encoder.
MAX_NESTING = 500
#: Each process has connections of its own, so a larger number is a typing error.
MAX_PROCESSES = 1000
#: Each thread has a connection of its own.
MAX_THREADS = 1000
#: A worker sets memory aside for each message that it may hold.
MAX_BATCH_SIZE = 10_000
MAX_ASYNC_SLOTS = 100_000
#: Options that a queue inherits from the settings for all queues.
INHERITED = ("retry", "lease", "batch_size", "batch_bytes", "dead_retention")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBackoff:
    """How the fleet eases off a failing queue.

    A queue waits min(multiplier * 2**level, maximum) seconds, give or take the share `jitter`.
    """

    multiplier: float = option(duration(), 1.0)
    maximum: float = option(duration(zero=True), 120.0)
    jitter: float = option(readers.share, 0.1)


def _queue_backoff(value: object) -> QueueBackoff | None:
    raw = optional(readers.mapping)(value)
    if raw is None:
        return None
    errors: list[SettingError] = []
    values = read_fields(QueueBackoff, raw, str.lower, "backoff", errors)
    if errors:
        raise ValueError("; ".join(each.as_part() for each in errors))
    return QueueBackoff(**values)


def _hidden_settings() -> re.Pattern[str]:
    from django.views.debug import SafeExceptionReporterFilter  # imports the template engine

    hidden = SafeExceptionReporterFilter.hidden_settings
    # The metadata of an event contain its order key as `ce_partitionkey`.
    return re.compile(hidden.pattern.replace("KEY", "(?<!PARTITION)KEY"), hidden.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The options of one queue, including the inherited ones."""

    retry: RetryPolicy = option(readers.retry_policy)
    lease: float = option(duration())
    batch_size: int = option(integer(1, MAX_BATCH_SIZE))
    batch_bytes: int = option(integer(1))
    dead_retention: float | None = option(optional(duration()))
    ordered: bool = option(flag, False)
    key_order: Literal["commit"] | None = option(optional(one_of("commit")), None)
    on_dead_head: Literal["block", "skip"] = option(one_of("block", "skip"), "block")
    backoff: QueueBackoff | None = option(_queue_backoff, None)
    max_in_flight: int | None = option(optional(integer(0)), None)
    max_backlog: int | None = option(optional(integer(1)), None)
    warn_depth: int = option(integer(0), 1000)
    warn_every: float = option(duration(), 6 * 3600.0)
    history: float | None = option(optional(duration()), None)
    history_payload: bool = option(flag, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`DJANGO_MQ`, checked: each setting in lower case, durations in seconds."""

    database: str | None = option(optional(readers.text), None)
    default_queue: str = option(readers.name, "default")
    require_atomic: bool = option(flag, True)
    wakeup: str = option(readers.text, "notify")
    poll_interval: float = option(duration(), 1.0)
    lease: float = option(duration(), 30.0)
    batch_size: int = option(integer(1, MAX_BATCH_SIZE), 100)
    batch_bytes: int = option(integer(1), 4 * 1024 * 1024)
    slice_seconds: float = option(duration(), 0.1)
    processes: int = option(integer(1, MAX_PROCESSES), 1)
    threads: int = option(integer(1, MAX_THREADS), 1)
    async_slots: int = option(integer(1, MAX_ASYNC_SLOTS), 100)
    timeout: float = option(duration(), 300.0)
    retry: RetryPolicy = option(readers.retry_policy, make=RetryPolicy)
    retry_floor: float = option(duration(zero=True), 0.1)
    drain_seconds: float = option(duration(zero=True), 30.0)
    max_rss: int | None = option(optional(integer(1)), None)
    health_port: int | None = option(optional(integer(1, 65535)), None)
    max_payload_bytes: int = option(integer(2), 1024 * 1024)
    max_metadata_bytes: int = option(integer(2), 16 * 1024)
    max_depth: int = option(integer(1, MAX_NESTING), 64)
    max_delay: float = option(duration(), 366 * DAY)
    max_hops: int = option(integer(1), 100)
    hold_for: float = option(duration(zero=True), DAY)
    result_retention: float | None = option(optional(duration()), DAY)
    attempt_retention: float | None = option(optional(duration()), 30 * DAY)
    dead_retention: float | None = option(optional(duration()), None)
    encoder: str = option(readers.text, "django.core.serializers.json.DjangoJSONEncoder")
    redact: re.Pattern[str] | None = option(optional(readers.pattern), make=_hidden_settings)
    log_error_texts: bool = option(flag, False)
    admin: bool = option(flag, True)
    queues: Mapping[str, QueueOptions] = option(readers.mapping, make=dict)
    relays: Mapping[str, Destination] = option(readers.mapping, make=dict)
    inboxes: Mapping[str, Inbox] = option(readers.mapping, make=dict)
    #: The options of a queue that `queues` does not list.
    unlisted: QueueOptions

    def queue(self, name: str) -> QueueOptions:
        """Return the options of a queue, listed or not."""
        return self.queues.get(name, self.unlisted)

    def in_line(self, queue: str, key: str | None) -> bool:
        """Return whether a message of `queue` with this order key is in a line."""
        return key is not None or self.queue(queue).ordered

    def listen_alias(self, alias: str) -> str | None:
        """Return the alias on which to LISTEN for messages in `alias`; None: poll."""
        return {"notify": alias, "poll": None}.get(self.wakeup, self.wakeup)

    @property
    def encoder_class(self) -> type[JSONEncoder]:
        """The class that `encoder` names, imported on access.

        Raises ImproperlyConfigured if it cannot be imported, or is not a JSONEncoder.
        """
        try:
            found = import_string(self.encoder)
        except Exception as error:  # importing the module may raise anything
            raise ImproperlyConfigured(
                f"DJANGO_MQ['ENCODER'] is {self.encoder!r}: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, JSONEncoder)):
            raise ImproperlyConfigured(
                f"DJANGO_MQ['ENCODER'] is {self.encoder!r}: it must subclass json.JSONEncoder."
            )
        return found

    def encode_payload(
        self, value: object, what: str = "payload", *, encoder: type[JSONEncoder] | None = None
    ) -> str:
        """Return `value` as JSON text within the limits of payloads.

        `what` names the value in an error. `encoder` is `encoder_class`, if the caller has looked
        it up. Raises InvalidPayload.
        """
        return self._encode(value, what, self.max_payload_bytes, encoder)

    def encode_metadata(self, value: object, *, encoder: type[JSONEncoder] | None = None) -> str:
        """Return `value` as JSON text within the limits of metadata, like `encode_payload()`."""
        return self._encode(value, "metadata", self.max_metadata_bytes, encoder)

    def _encode(
        self, value: object, what: str, max_bytes: int, encoder: type[JSONEncoder] | None
    ) -> str:
        return encode(
            value,
            what=what,
            max_bytes=max_bytes,
            max_depth=self.max_depth,
            encoder=encoder or self.encoder_class,
        )


@cache
def get_settings() -> Settings:
    """Return `settings.DJANGO_MQ` as `Settings`; cached until `override_settings` changes it.

    Raises ImproperlyConfigured, which lists every error.
    """
    settings, errors = _read_settings(getattr(django_settings, "DJANGO_MQ", {}))
    if settings is None:
        raise ImproperlyConfigured("\n".join(map(str, errors)))
    return settings


def alias_of(using: str | None = None) -> str:
    """Return the alias of the messages' database: `using`, else DATABASE, else the router's choice.

    Apps must be ready. Raises InvalidOption if `using` cannot be an alias, and ImproperlyConfigured
    if django_mq is not installed; Django raises ConnectionDoesNotExist later if there is none of
    this name.
    """
    if using is not None:
        if not isinstance(using, str) or not using:  # Django itself treats "" as the default
            raise InvalidOption(
                f"using must be the alias of a database, or None, not {short_repr(using)}"
            )
        return using
    if alias := get_settings().database:
        return alias
    try:
        model = apps.get_model("django_mq", "QueuedMessage")
    except LookupError as error:
        raise ImproperlyConfigured(
            'django_mq is not installed: add "django_mq" to INSTALLED_APPS, and run migrate'
        ) from error
    return router.db_for_write(model)


def command_on(alias: str, command: str) -> str:
    """Return a command with the option that it needs for the messages of `alias`, if any."""
    return command if alias == alias_of(None) else f"{command} --database {alias}"


def is_postgresql(alias: str) -> bool:
    """Return whether `alias` exists, its backend can be loaded, and it is PostgreSQL."""
    try:
        return alias in connections and connections[alias].vendor == "postgresql"
    except ImproperlyConfigured:
        return False


def find_errors(raw: object) -> list[SettingError]:
    """Return every error in a value of `DJANGO_MQ`.

    >>> [str(error) for error in find_errors({"BATCHSIZE": 5})]
    ["DJANGO_MQ['BATCHSIZE'] is unknown. Did you mean 'BATCH_SIZE'?"]
    """
    return _read_settings(raw)[1]


def _read_settings(raw: object) -> tuple[Settings | None, list[SettingError]]:
    if not isinstance(raw, Mapping):
        return None, [SettingError("DJANGO_MQ", f"is {short_repr(raw)}: must be a dict.")]
    errors: list[SettingError] = []
    option_of_a_queue = partial(
        hint_of, QueueOptions, str.lower, "It is an option of a queue: DJANGO_MQ['QUEUES'][...]"
    )
    setting_for_all = partial(
        hint_of, Settings, str.upper, "It is a setting for all queues: DJANGO_MQ"
    )
    values = read_fields(Settings, raw, str.upper, "DJANGO_MQ", errors, elsewhere=option_of_a_queue)
    inherited = {each: values[each] for each in INHERITED}
    queues = {}
    for name, options in values.pop("queues").items():
        where = f"DJANGO_MQ['QUEUES'][{name!r}]"
        if (given := readers.read_entry(name, options, where, errors)) is not None:
            listed = read_fields(
                QueueOptions, given, str.lower, where, errors, inherited, setting_for_all
            )
            queues[name] = QueueOptions(**listed)
    values["relays"] = read_destinations(values["relays"], errors)
    values["inboxes"] = read_inboxes(values["inboxes"], errors)
    if errors:
        return None, errors
    unlisted = QueueOptions(**inherited)
    return Settings(**values, queues=MappingProxyType(queues), unlisted=unlisted), []


def _clear_cache(*, setting: str, **_: object) -> None:
    if setting == "DJANGO_MQ":
        get_settings.cache_clear()


setting_changed.connect(_clear_cache, dispatch_uid="django_mq.conf")
