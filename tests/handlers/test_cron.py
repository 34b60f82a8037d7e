"""Cron expressions in time zones: cronsim's results at both clock changes."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest

from django_mq.exceptions import InvalidOption
from django_mq.handlers.cron import NOT_INSTALLED, can_read_cron, in_words, times_of
from django_mq.policy.due_times import last_times
from tests.slow import slow

BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")
#: In Berlin, 2:00 becomes 3:00 on the first of these days, and 3:00 becomes 2:00 on the other.
SPRING, AUTUMN = datetime(2026, 3, 29, tzinfo=BERLIN), datetime(2026, 10, 25, tzinfo=BERLIN)
START = datetime(2000, 1, 1, tzinfo=UTC)


def times(cron, tz="Europe/Berlin"):
    return times_of(cron, None, tz, start=START)


def of_day(cron, day):
    """Return the times of a day in local time, each with its offset from UTC in hours."""
    begin, end = day.astimezone(UTC), (day + timedelta(days=1)).astimezone(UTC)
    found = takewhile(lambda at: at < end, times(cron).after(begin - timedelta(seconds=1)))
    return [at.astimezone(BERLIN).strftime("%H:%M%z")[:-2] for at in found]


@pytest.mark.parametrize(
    ("cron", "spring", "autumn"),
    [
        # A fixed hour and minute: once, whatever the clocks do.
        ("30 2 * * *", ["03:00+02"], ["02:30+02"]),
        ("0 3 * * *", ["03:00+02"], ["03:00+01"]),
        ("0,30 2 * * *", ["03:00+02"], ["02:00+02", "02:30+02"]),
        ("0 2,3 * * *", ["03:00+02"], ["02:00+02", "03:00+01"]),
        ("30 4 * * *", ["04:30+02"], ["04:30+01"]),
        # Wildcards: in both repeated hours, but not in a skipped one.
        ("*/30 2 * * *", [], ["02:00+02", "02:30+02", "02:00+01", "02:30+01"]),
        # Seconds: as with wildcards.
        ("0 30 2 * * *", [], ["02:30+02", "02:30+01"]),
    ],
)
def test_both_changes_of_the_clocks(cron, spring, autumn):
    assert of_day(cron, SPRING) == spring
    assert of_day(cron, AUTUMN) == autumn


def test_every_hour_runs_23_and_25_times_on_those_days():
    assert len(of_day("15 * * * *", SPRING)) == 23
    assert len(of_day("15 * * * *", AUTUMN)) == 25


@pytest.mark.parametrize(
    "zone",
    [
        BERLIN,
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (NEW_YORK, ZoneInfo("America/Sao_Paulo"))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "cron",
    [
        "30 2 * * *",
        "30 * * * *",
        "15 1-3 * * *",
        *slow("0,30 2 * * *", "*/15 2 * * *", "0 0 * * *"),
    ],
)
def test_the_next_time_is_the_same_wherever_the_search_begins(cron, zone):
    """A worker may start at any moment, even in the second half of a repeated hour."""
    found = times(cron, str(zone))
    hour = timedelta(hours=1)
    at, changes = datetime(2017, 1, 1, tzinfo=UTC), []
    while len(changes) < 4:
        if (at + hour).astimezone(zone).utcoffset() != at.astimezone(zone).utcoffset():
            changes.append(at + hour)
        at += hour
    for change in changes:
        begin, end = change - 60 * hour, change + 60 * hour
        walked = list(takewhile(lambda at: at <= end, found.after(begin)))  # noqa: B023
        for minutes in range(-180, 180, 7):
            at = change + timedelta(minutes=minutes)
            assert next(found.after(at)) == next(each for each in walked if each > at), at
            assert last_times(found, first=walked[0], until=at, maximum=1) == [
                max(each for each in walked if each <= at)
            ]


def test_times_are_in_utc_and_to_the_second():
    [first, second] = islice(
        times("0 6 * * mon-fri").after(datetime(2026, 6, 5, 3, 59, 59, 999_999, tzinfo=UTC)), 2
    )
    assert first == datetime(2026, 6, 5, 4, tzinfo=UTC)
    assert second == datetime(2026, 6, 8, 4, tzinfo=UTC)
    assert first.tzinfo is UTC


@pytest.mark.parametrize(
    "cron",
    [
        "* * * *",
        "61 * * * *",
        "0 0 30 2 *",
        "@daily",
        "0 6 * * fun",
        "x" * 300,
        "9" * 90,
        "0 0 " + "1," * 130 + "1 * *",
    ],
)
def test_bad_expressions(cron):
    with pytest.raises(InvalidOption, match="cron"):
        times(cron)


def test_an_expression_without_times():
    with pytest.raises(InvalidOption, match="no time in 50 years"):
        times("* * */20 * 1L")


@pytest.mark.parametrize(
    "tz", ["Europe/Bärlin", "Nowhere", "", "../UTC", "Europe", "a\0b", "x" * 999]
)
def test_unknown_time_zones(tz):
    with pytest.raises(InvalidOption, match="unknown time zone"):
        times("0 6 * * *", tz)
    with pytest.raises(InvalidOption, match="unknown time zone"):
        times_of("", timedelta(hours=1), tz, start=START)


def test_times_end_where_python_has_no_more_dates():
    assert len(list(times("0 12 1 1 *").after(datetime(9990, 6, 1, tzinfo=UTC)))) == 9


def test_utc_needs_no_data_of_time_zones(monkeypatch):
    """A container image may have none, and UTC is the default."""
    monkeypatch.setattr("django_mq.handlers.cron.ZoneInfo", {}.__getitem__)
    at = datetime(2026, 6, 5, tzinfo=UTC)
    assert next(times("0 6 * * *", "UTC").after(at)) == at + timedelta(hours=6)
    with pytest.raises(InvalidOption, match="install tzdata"):
        times("0 6 * * *")


def test_without_cronsim_intervals_work_and_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert not can_read_cron()
    hourly = times_of("", timedelta(hours=1), "UTC", start=START)
    assert next(hourly.after(START)) == START + timedelta(hours=1)
    with pytest.raises(InvalidOption) as refused:
        times("0 6 * * *")
    assert str(refused.value) == NOT_INSTALLED


@pytest.mark.parametrize("every", [None, timedelta(0), timedelta(seconds=0.9), timedelta(-1)])
def test_an_interval_is_a_second_or_more(every):
    with pytest.raises(InvalidOption, match="at least 1 s"):
        times_of("", every, "UTC", start=START)


@pytest.mark.parametrize(
    ("cron", "every", "tz", "words"),
    [
        (
            "0 6 * * mon-fri",
            None,
            "Europe/Berlin",
            "at 06:00 on Monday through Friday, Europe/Berlin",
        ),
        ("*/5 * * * *", None, "UTC", "every fifth minute of every hour, UTC"),
        ("0 0 L * *", None, "UTC", "at 00:00 on the last day of every month, UTC"),
        (
            "0 0 11,21-22,31 * *",
            None,
            "UTC",
            "at 00:00 on the 11th, the 21st, the 22nd, and the 31st day of month, UTC",
        ),
        ("", timedelta(seconds=5400), "Asia/Kolkata", "every 1 h 30 min"),
        # Another client may have written anything.
        ("61 * * * *", None, "UTC", "61 * * * *, UTC"),
        ("é", None, "nowhere", "é, nowhere"),
        ("", None, "UTC", "never"),
    ],
)
def test_words(cron, every, tz, words):
    assert in_words(cron, every, tz) == words


def test_without_cronsim_the_expression_stands_for_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert in_words("0 6 * * *", None, "UTC") == "0 6 * * *, UTC"
