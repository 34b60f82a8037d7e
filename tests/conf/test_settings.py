"""settings.DJANGO_MQ: defaults, reading, and all its possible errors (PMQ-34, NSQ-32)."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.test import override_settings

import django_mq
from django_mq.conf import QueueBackoff, Settings, find_errors, get_settings
from django_mq.policy.backoff import RetryPolicy, fixed


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    get_settings.cache_clear()


def read(**raw: Any) -> Settings:
    with override_settings(DJANGO_MQ=raw):
        return get_settings()


def test_defaults() -> None:
    """KAF-14, PMQ-19, CAR-30, NSQ-19, NSQ-20, NSQ-23, KAF-7 as design.md has them."""
    settings = read()
    values = {
        each.name: getattr(settings, each.name)
        for each in dataclasses.fields(settings)
        if each.name not in ("queues", "inboxes", "relays", "unlisted", "redact")
    }
    day = 86400
    assert values == {
        "database": None,
        "default_queue": "default",
        "require_atomic": True,
        "wakeup": "notify",
        "poll_interval": 1,
        "lease": 30,
        "batch_size": 100,
        "batch_bytes": 4 * 2**20,
        "slice_seconds": 0.1,
        "processes": 1,
        "threads": 1,
        "async_slots": 100,
        "timeout": 300,
        "retry": RetryPolicy(),
        "retry_floor": 0.1,
        "drain_seconds": 30,
        "max_rss": None,
        "health_port": None,
        "max_payload_bytes": 2**20,
        "max_metadata_bytes": 16 * 2**10,
        "max_depth": 64,
        "max_delay": 366 * day,
        "max_hops": 100,
        "hold_for": day,
        "result_retention": day,
        "attempt_retention": 30 * day,
        "dead_retention": None,
        "encoder": "django.core.serializers.json.DjangoJSONEncoder",
        "log_error_texts": False,
        "admin": True,
    }
    assert (settings.queues, settings.relays, settings.inboxes) == ({}, {}, {})
    assert settings.encoder_class is DjangoJSONEncoder


def test_defaults_of_a_queue() -> None:
    """CAR-38: warns above 1,000, at most every 6 hours."""
    assert dataclasses.asdict(read().queue("any")) == {
        "retry": dataclasses.asdict(RetryPolicy()),
        "lease": 30,
        "batch_size": 100,
        "batch_bytes": 4 * 2**20,
        "dead_retention": None,
        "ordered": False,
        "key_order": None,
        "on_dead_head": "block",
        "backoff": None,
        "max_in_flight": None,
        "max_backlog": None,
        "warn_depth": 1000,
        "warn_every": 6 * 3600,
        "history": None,
        "history_payload": False,
    }


def test_nothing_in_the_settings_file_is_all_defaults(settings: Any) -> None:
    if hasattr(settings, "DJANGO_MQ"):
        del settings.DJANGO_MQ
    get_settings.cache_clear()
    assert get_settings() == read()


def test_durations_become_seconds() -> None:
    settings = read(
        LEASE=timedelta(minutes=1),
        POLL_INTERVAL=2,
        DRAIN_SECONDS=0,
        DEAD_RETENTION=timedelta(days=7),
        QUEUES={"mail": {"lease": timedelta(minutes=2), "warn_every": 60}},
    )
    mail = settings.queue("mail")
    found = (
        settings.lease,
        settings.poll_interval,
        settings.drain_seconds,
        settings.dead_retention,
        mail.lease,
        mail.warn_every,
    )
    assert found == (60, 2, 0, 604800, 120, 60)
    assert {type(each) for each in found} == {float}


def test_options_of_a_queue_override_the_settings() -> None:
    """QUEUES[name], then DJANGO_MQ, then the default."""
    settings = read(
        LEASE=10,
        RETRY=RetryPolicy(3),
        BATCH_SIZE=7,
        QUEUES={
            "mail": {"retry": RetryPolicy(5, fixed(1)), "batch_size": 1, "max_in_flight": 0},
            "slow": {},
        },
    )
    mail, slow, unlisted = map(settings.queue, ("mail", "slow", "other"))
    assert (mail.retry.max_attempts, mail.batch_size, mail.lease) == (5, 1, 10)
    assert (mail.max_in_flight, slow.max_in_flight) == (0, None)
    assert slow == unlisted
    assert (slow.retry.max_attempts, slow.batch_size, slow.lease) == (3, 7, 10)
    assert set(settings.queues) == {"mail", "slow"}


def test_queue_backoff_is_off_or_has_all_its_numbers() -> None:
    """NSQ-3, NSQ-6: 1 s and 2 min; a maximum of zero is allowed and never waits."""
    queues = {
        "off": {},
        "none": {"backoff": None},
        "on": {"backoff": {}},
        "set": {"backoff": {"multiplier": timedelta(seconds=2), "maximum": 0, "jitter": 1}},
    }
    settings = read(QUEUES=queues)
    assert settings.queue("off").backoff is settings.queue("none").backoff is None
    assert settings.queue("on").backoff == QueueBackoff(multiplier=1, maximum=120, jitter=0.1)
    assert settings.queue("set").backoff == QueueBackoff(multiplier=2, maximum=0, jitter=1)


def test_settings_are_read_once_and_again_when_they_change() -> None:
    with override_settings(DJANGO_MQ={"LEASE": 5}):
        outer = get_settings()
        assert outer is get_settings()
        with override_settings(DJANGO_MQ={"LEASE": 6}):
            assert get_settings().lease == 6
        assert get_settings().lease == 5
        with override_settings(TIME_ZONE="UTC"):
            known = get_settings()
        assert known is get_settings()


def test_settings_are_frozen() -> None:
    settings = read(QUEUES={"mail": {}})
    with pytest.raises(AttributeError):
        settings.lease = 5
    with pytest.raises(TypeError):
        settings.queues["mail"] = settings.unlisted


def test_later_changes_of_the_raw_dict_do_not_reach_the_settings() -> None:
    raw: dict[str, Any] = {"mail": {"batch_size": 5}}
    settings = read(QUEUES=raw)
    raw["mail"]["batch_size"] = 6
    raw["late"] = {}
    assert settings.queue("mail").batch_size == 5
    assert "late" not in settings.queues


@pytest.mark.parametrize("redact", ["canary|pin", re.compile("CANARY")])
def test_redact_is_a_pattern(redact: object) -> None:
    pattern = read(REDACT=redact).redact
    assert pattern is not None
    assert bool(pattern.search("MY_CANARY"))
    assert not pattern.search("address")


def test_redact_defaults_to_djangos_hidden_settings() -> None:
    """S12."""
    pattern = read().redact
    assert pattern is not None
    assert all(pattern.search(each) for each in ("api_token", "PASSWORD", "Secret"))
    assert not pattern.search("address")
    assert read(REDACT=None).redact is None


def test_redact_shows_the_order_key_of_an_event_by_default() -> None:
    """S12: inboxes store it as `ce_partitionkey`, and the column `key` shows it anyway."""
    pattern = read().redact
    assert pattern is not None
    assert not any(pattern.search(each) for each in ("partitionkey", "ce_partitionKey"))
    hidden = ("key", "ce_key", "partitionkey_secret", "partitionkey.apikey", "PartitionSigningKey")
    assert all(pattern.search(each) for each in hidden)


class OwnEncoder(json.JSONEncoder):
    pass


def test_encoder_is_imported_when_asked_for() -> None:
    settings = read(ENCODER=f"{__name__}.OwnEncoder")
    assert settings.encoder_class.__qualname__ == "OwnEncoder"


@pytest.mark.parametrize(
    "path",
    ["nowhere.Encoder", "json.Nothing", "json", "json.dumps", "json.JSONDecoder", ".", "a b"],
)
def test_error_of_a_broken_encoder_names_it(path: str) -> None:
    settings = read(ENCODER=path)  # the settings are valid: E008 reports it
    with pytest.raises(ImproperlyConfigured, match="ENCODER") as caught:
        _ = settings.encoder_class
    assert repr(path) in str(caught.value)


BAD = [
    ("DATABASE", ["", 5, True]),
    ("DEFAULT_QUEUE", ["", None, "a b", "ä", "a" * 129, 5]),
    ("REQUIRE_ATOMIC", [1, None, "yes"]),
    ("WAKEUP", [None, "", True]),
    ("POLL_INTERVAL", [0, -1, "1", None, True, timedelta(0), float("nan"), float("inf"), 1e10]),
    ("LEASE", [0, -1, "30", None, [30]]),
    ("BATCH_SIZE", [0, -1, 1.0, "100", None, True, 10_001, 2**31]),
    ("BATCH_BYTES", [0, None]),
    ("SLICE_SECONDS", [0, None]),
    ("PROCESSES", [0, 1.5, None, 1001]),
    ("THREADS", [0, "2", 1001]),
    ("ASYNC_SLOTS", [0, 100_001]),
    ("TIMEOUT", [0, None]),
    ("RETRY", [None, 5, {"kind": "fixed", "seconds": 1}, RetryPolicy, fixed(5)]),
    ("RETRY_FLOOR", [None, -1, "0.1", True, float("inf")]),
    ("DRAIN_SECONDS", [-1, None]),
    ("MAX_RSS", [0, 0.5, "100"]),
    ("HEALTH_PORT", [0, 65536, "80", True]),
    ("MAX_PAYLOAD_BYTES", [1, None]),
    ("MAX_METADATA_BYTES", [1]),
    ("MAX_DEPTH", [0, 501, 10**6]),
    ("MAX_DELAY", [0, None, timedelta(days=40000)]),
    ("MAX_HOPS", [0, None]),
    ("HOLD_FOR", [-1, None]),
    ("RESULT_RETENTION", [0, "1 day"]),
    ("ATTEMPT_RETENTION", [0]),
    ("DEAD_RETENTION", [0]),
    ("ENCODER", [None, "", DjangoJSONEncoder]),
    ("REDACT", ["", "(", 5, re.compile(b"x")]),
    ("LOG_ERROR_TEXTS", [None, 0, "yes"]),
    ("ADMIN", [None, 0]),
    ("QUEUES", [None, [], ["mail"], "mail"]),
    ("RELAYS", [None, [], ["events"], "events"]),
    ("INBOXES", [None, [], ["crm"], "crm"]),
]


def test_every_setting_is_in_the_table_of_bad_values() -> None:
    known = {each.name.upper() for each in dataclasses.fields(Settings)} - {"UNLISTED"}
    assert {name for name, _ in BAD} == known


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD for value in values]
)
def test_bad_value_is_one_error_that_names_setting_and_bound(name: str, value: object) -> None:
    """NSQ-32: option, value and bound."""
    (error,) = find_errors({name: value})
    assert error.where == f"DJANGO_MQ[{name!r}]"
    assert re.match(r"is .*: must be ", error.problem)
    with pytest.raises(ImproperlyConfigured, match=name):
        read(**{name: value})


BAD_OPTIONS = [
    ("retry", [None, 5]),
    ("lease", [0, None, "30"]),
    ("batch_size", [0, None, True, 10_001]),
    ("batch_bytes", [0]),
    ("dead_retention", [0, -1]),
    ("ordered", [1, None]),
    ("key_order", ["id", True, ""]),
    ("on_dead_head", [None, "stop"]),
    (
        "backoff",
        [
            True,
            2,
            {"multiplier": 0},
            {"multiplier": None},
            {"maximum": -1},
            {"jitter": 1.1},
            {"jitter": True},
            {"jitter": timedelta(0)},
            {"multiply": 2},
        ],
    ),
    ("max_in_flight", [-1, 1.5, 2**31]),
    ("max_backlog", [0]),
    ("warn_depth", [-1, None]),
    ("warn_every", [0, None]),
    ("history", [0, -1, True, "x"]),
    ("history_payload", [None, 1]),
]


def test_every_option_is_in_the_table_of_bad_values() -> None:
    known = {each.name for each in dataclasses.fields(read().unlisted)}
    assert {name for name, _ in BAD_OPTIONS} == known


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_OPTIONS for value in values]
)
def test_bad_option_of_a_queue_is_one_error(name: str, value: object) -> None:
    """PMQ-34, NSQ-32."""
    (error,) = find_errors({"QUEUES": {"mail": {name: value}}})
    assert error.where == f"DJANGO_MQ['QUEUES']['mail'][{name!r}]"
    assert error.problem.startswith("is ")


def test_a_bad_number_of_queue_backoff_is_named() -> None:
    (error,) = find_errors({"QUEUES": {"mail": {"backoff": {"multiply": 2, "jitter": 2}}}})
    assert error.problem.endswith(
        ": backoff['multiply'] is unknown (Did you mean 'multiplier'?);"
        " backoff['jitter'] is 2: must be a number from 0 to 1."
    )


def test_a_number_too_long_to_print_is_an_error() -> None:
    (error,) = find_errors({"BATCH_SIZE": 10**5000})
    assert error.problem == "is a value of type int: must be a whole number from 1 to 10000."


@pytest.mark.parametrize("name", ["", "a b", None, 5, "{x}", "a*"])
def test_bad_name_of_a_queue_is_an_error(name: object) -> None:
    """S04, PMQ-5."""
    (error,) = find_errors({"QUEUES": {name: {}}})
    assert repr(name) in error.where
    assert "name" in error.problem


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ({"LEASES": 5}, "Did you mean 'LEASE'?"),
        ({"lease": 5}, "Did you mean 'LEASE'?"),
        ({"MAX_PAYLOAD_BYTE": 5}, "Did you mean 'MAX_PAYLOAD_BYTES'?"),
        ({"UNLISTED": 5}, None),
        ({"XYZZY": 5}, None),
        ({5: 5}, None),
        ({"QUEUES": {"mail": {"batchsize": 5}}}, "Did you mean 'batch_size'?"),
        ({"QUEUES": {"mail": {"LEASE": 5}}}, "Did you mean 'lease'?"),
        ({"QUEUES": {"{x}": {}, "mail": {"xyzzy": 5}}}, None),
        (
            {"MAX_BACKLOG": 5},
            "It is an option of a queue: DJANGO_MQ['QUEUES'][...]['max_backlog'].",
        ),
        ({"ordered": True}, "It is an option of a queue: DJANGO_MQ['QUEUES'][...]['ordered']."),
        (
            {"QUEUES": {"mail": {"timeout": 5}}},
            "It is a setting for all queues: DJANGO_MQ['TIMEOUT'].",
        ),
        (
            {"QUEUES": {"mail": {"HOLD_FOR": 5}}},
            "It is a setting for all queues: DJANGO_MQ['HOLD_FOR'].",
        ),
        (
            {"MAX_ATTEMPTS": 5},
            "It is part of 'RETRY': RetryPolicy(max_attempts=..., backoff=...).",
        ),
        (
            {"QUEUES": {"mail": {"max_retries": 5}}},
            "It is part of 'retry': RetryPolicy(max_attempts=..., backoff=...).",
        ),
        ({"BACKOFF": {}}, "It is an option of a queue: DJANGO_MQ['QUEUES'][...]['backoff']."),
    ],
)
def test_unknown_key_is_an_error_with_a_hint(raw: dict[Any, Any], hint: str | None) -> None:
    error = find_errors(raw)[-1]
    assert error.problem == "is unknown."
    assert error.hint == hint


@pytest.mark.parametrize("raw", [None, [], "x", 5])
def test_settings_that_are_no_dict_are_one_error(raw: object) -> None:
    (error,) = find_errors(raw)
    assert error.where == "DJANGO_MQ"


def test_all_errors_are_reported_at_once() -> None:
    raw = {
        "LEESE": 5,
        "BATCH_SIZE": 0,
        "QUEUES": {"a b": {"lease": 0}, "mail": {"retry": 1, "odd": 2}, "list": []},
    }
    assert len(find_errors(raw)) == 7
    with pytest.raises(ImproperlyConfigured) as caught:
        read(**raw)
    text = str(caught.value)
    for each in ("LEESE", "LEASE", "BATCH_SIZE", "'a b'", "'retry'", "'odd'", "'list'"):
        assert each in text


def test_good_settings_have_no_errors() -> None:
    assert find_errors({}) == []
    assert find_errors({"DATABASE": "other", "MAX_RSS": 512, "HEALTH_PORT": 8000}) == []


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert django_mq.__version__ == project["version"]
