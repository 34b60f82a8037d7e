"""The pages of schedules: content by permission, buttons, and adding schedules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

from django_mq import handler
from django_mq.models import QueuedMessage, Schedule
from tests.admin.pages import text, told, url
from tests.database import second_connection, until_any_blocked
from tests.outbox.schedules.conftest import put
from tests.slow import slow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

FORM = {
    "name": "report",
    "type": "shop.reports.daily",
    "payload": '{"n": 1}',
    "metadata": "",
    "queue": "",
    "cron": "0 6 * * mon-fri",
    "every": "",
    "tz": "Europe/Berlin",
    "catch_up": "once",
    "overlap": "allow",
    "expires": "",
    "enabled": "on",
}


@pytest.fixture
def keeper(login):
    """A user who may view and change schedules, and sees no payloads."""
    return login("view_schedule", "change_schedule", "view_queuedmessage", name="keeper")


@pytest.fixture
def looker(login):
    return login("view_schedule", name="looker")


def page(client, name="hourly"):
    response = client.get(url("schedule", "change", name))
    assert response.status_code == 200
    return response


def press(client, button, name="hourly"):
    return client.post(url("schedule", button), {"schedule": name})


def errors(response):
    return {name: list(found) for name, found in response.context["adminform"].errors.items()}


def test_the_groups_of_fields_have_names_of_their_own(keeper):
    """Jazzmin makes tabs of them, of which two with the same name show the same fields."""
    put("hourly", source="admin")
    names = [name for name, _fields in page(keeper).context["adminform"].fieldsets]
    assert names == [None, "Definition"]


def test_the_list(looker):
    put("a-hourly", due=1800, queue="mail")
    put("b-cron", cron="0 6 * * *", tz="Europe/Berlin", due=60, last_error="full")
    put("c-off", enabled=False, due=None)
    put("d-late", due=-300)
    shown = text(looker.get(url("schedule")))
    for part in (
        "a-hourly shop.ping mail every 1 h enabled - in 29 min",
        "b-cron shop.ping at 06:00 every day, Europe/Berlin 0 6 * * * failed",
        "c-off shop.ping every 1 h disabled - -",
        "d-late shop.ping every 1 h overdue - 5 min ago",
    ):
        assert part in shown, shown
    assert "Add schedule" not in shown


def test_many_are_a_page_of_as_many_queries(looker):
    put("a", payload={"secret": "x"})
    with CaptureQueriesContext(connection) as few:
        looker.get(url("schedule"))
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_schedule (name, type, every)"
            " select 's' || n, 'shop.ping', '1 hour' from generate_series(1, 500) n"
        )
    with CaptureQueriesContext(connection) as many:
        looker.get(url("schedule"))
    assert len(many) == len(few)


def test_a_schedule_is_found_by_its_name_or_type(looker):
    put("one")
    put("two", type="shop.pong")
    for term, found in (("one", ["one"]), ("shop.pong", ["two"]), ("sho", []), ("a b", [])):
        listed = looker.get(url("schedule"), {"q": term}).context["cl"].result_list
        assert [each.name for each in listed] == found


def test_the_page_of_one_shows_the_next_times_and_the_last_message(keeper):
    made = put(due=600, source="code")
    Schedule.objects.update(last_at=made.created_at, last_message=41)
    shown = page(keeper)
    assert url("queuedmessage", "change", 41) in shown.content.decode()
    for number in range(3):
        assert f"{made.next_at + number * timedelta(hours=1):%H:%M:%S}" in text(shown)


@pytest.mark.parametrize("source", ["code", "admin"])
def test_page_of_a_schedule_shows_its_times_in_words(keeper, source):
    put("report", cron="0 6 * * mon-fri", tz="Europe/Berlin", source=source)
    said = "at 06:00 on Monday through Friday, Europe/Berlin 0 6 * * mon-fri"
    assert said in text(page(keeper, "report"))


def test_contents_and_errors_need_permission_to_view_payloads(looker, keeper, boss):
    for name, source in (("code", "code"), ("admin", "admin")):
        put(
            name,
            source=source,
            payload={"to": "ada@example.com", "password": "canary"},
            metadata={"from": "eve@example.com"},
            last_error="it was ada@example.com",
        )
        for client in (looker, keeper):
            assert "example.com" not in text(page(client, name))
        assert "example.com" in text(page(boss, name))
    shown = text(page(boss, "code"))
    assert "it was ada@example.com" in shown
    assert "eve@example.com" in shown
    assert "canary" not in shown


def test_view_permission_allows_no_change(looker):
    put()
    assert "Run now" not in text(page(looker))
    for button in ("run", "enable", "disable"):
        assert press(looker, button).status_code == 403
    assert looker.get(url("schedule", "add")).status_code == 403
    assert looker.post(url("schedule", "add"), FORM).status_code == 403
    assert looker.post(url("schedule", "change", "hourly"), FORM).status_code == 403
    assert looker.post(url("schedule", "delete", "hourly"), {"post": "yes"}).status_code == 403
    assert Schedule.objects.get().enabled
    assert not QueuedMessage.objects.exists()


def test_run_now(keeper):
    before = put(due=600, source="code")
    response = press(keeper, "run")
    [message] = QueuedMessage.objects.all()
    assert told(response) == ["Schedule hourly was broadcast."]
    now = Schedule.objects.get()
    assert (now.last_message, now.next_at) == (message.pk, before.next_at)
    [entry] = LogEntry.objects.all()
    assert (entry.object_repr, entry.get_change_message()) == ("hourly", f"Run: #{message.pk}.")
    assert "Run now" in text(page(keeper))


def test_run_now_with_a_message_that_still_waits(keeper):
    put(overlap="skip")
    press(keeper, "run")
    assert "still waits or runs" in told(press(keeper, "run"))[-1]
    assert QueuedMessage.objects.count() == 1
    assert LogEntry.objects.count() == 1


def test_run_now_that_is_refused(keeper):
    put(queue="slow")
    handler("shop.ping", queue="mail", name="h")(lambda delivery: None)
    assert "cannot go to queue slow" in told(press(keeper, "run"))[0]
    assert not LogEntry.objects.exists()


def test_disable_and_enable(keeper):
    put(due=600, source="code")
    assert told(press(keeper, "disable")) == ["Schedule hourly is disabled."]
    off = Schedule.objects.get()
    assert (off.enabled, off.decision, off.next_at) == (False, False, None)
    assert "by an operator" in text(page(keeper))
    assert told(press(keeper, "enable")) == ["Schedule hourly is enabled."]
    on = Schedule.objects.get()
    assert (on.enabled, on.decision) == (True, True)
    assert on.next_at > on.created_at + timedelta(minutes=59)
    assert [each.get_change_message() for each in LogEntry.objects.order_by("pk")] == [
        "Disabled.",
        "Enabled.",
    ]


def test_buttons_of_a_missing_schedule(keeper):
    assert press(keeper, "run", "nothing").status_code == 404
    assert press(keeper, "run", "a\0b").status_code == 404
    assert keeper.get(url("schedule", "run")).status_code == 302


def test_a_schedule_made_in_the_admin(keeper):
    assert keeper.post(url("schedule", "add"), FORM).status_code == 302
    made = Schedule.objects.get()
    assert (made.name, made.type, made.payload, made.metadata) == (
        "report",
        "shop.reports.daily",
        {"n": 1},
        {},
    )
    assert (made.source, made.enabled, made.cron, made.tz) == (
        "admin",
        True,
        "0 6 * * mon-fri",
        "Europe/Berlin",
    )
    assert made.next_at > made.created_at
    assert LogEntry.objects.get().object_id == "report"


MISSPELT = {**FORM, "type": "shop.report.daily", "metadata": "{}"}


@pytest.fixture
def reporter(no_handlers):
    handler("shop.reports.daily", queue="reports", name="h")(lambda delivery: None)


@pytest.mark.usefixtures("reporter")
def test_misspelt_type_is_reported(boss):
    notice = (
        "No handler here takes shop.report.daily, the type of schedule report. Did you mean"
        " shop.reports.daily?"
    )
    assert told(boss.post(url("schedule", "add"), MISSPELT)).count(notice) == 1
    edited = boss.post(url("schedule", "change", "report"), {**MISSPELT, "catch_up": "all"})
    assert told(edited).count(notice) == 2


@pytest.mark.usefixtures("reporter")
@pytest.mark.parametrize("type", ["shop.reports.daily", "mail.sent"])
def test_other_types_are_taken_as_they_are(boss, type):
    notices = told(boss.post(url("schedule", "add"), {**FORM, "type": type}))
    assert not any("Did you mean" in each for each in notices)


@pytest.mark.usefixtures("reporter")
def test_no_type_of_a_queue_that_the_user_may_not_see_is_named(boss, monkeypatch):
    from django_mq.admin import ScheduleAdmin

    monkeypatch.setattr(ScheduleAdmin, "get_queues", lambda self, request: {"mail"})
    notices = told(boss.post(url("schedule", "add"), {**MISSPELT, "queue": "mail"}))
    assert Schedule.objects.get().type == "shop.report.daily"
    assert not any("Did you mean" in each for each in notices)


def test_one_that_is_not_enabled_yet(keeper):
    form = {**FORM, "cron": "", "every": "90"}
    form.pop("enabled")
    assert keeper.post(url("schedule", "add"), form).status_code == 302
    made = Schedule.objects.get()
    assert (made.every, made.enabled, made.next_at) == (timedelta(seconds=90), False, None)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": "a name"}, "name"),
        ({"type": "shop.*"}, "type"),
        ({"type": "tasks.shop.tasks.report"}, "type"),
        *slow(
            ({"queue": "a b"}, "queue"),
        ),
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "0 6 * * *", "every": "60"}, "cron"),
        *slow(
            ({"cron": ""}, "cron"),
            ({"cron": "", "every": "0.5"}, "every"),
        ),
        ({"cron": "", "every": "-60"}, "every"),
        ({"tz": "Europe/Bonn"}, "tz"),
        ({"payload": "{"}, "payload"),
        *slow(
            ({"payload": '"\\u0000"'}, "payload"),
            ({"payload": '"\\ud800"'}, "payload"),
            ({"payload": "1" * 5000}, "payload"),
            ({"payload": "[" * 600 + "]" * 600}, "payload"),
            ({"metadata": "[" * 100_000}, "metadata"),
            ({"metadata": "[]"}, "metadata"),
        ),
        ({"metadata": '{"mq.schedule": "x"}'}, "metadata"),
        ({"catch_up": "twice"}, "catch_up"),
        ({"expires": "-1"}, "expires"),
        *slow(
            ({"expires": "0"}, "expires"),
            ({"expires": "400 00:00:00"}, "expires"),
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_form_refuses_values_that_broadcast_refuses(boss, wrong, field):
    response = boss.post(url("schedule", "add"), {**FORM, **wrong})
    assert response.status_code == 200
    assert field in errors(response) or "__all__" in errors(response)
    if field in ("payload", "metadata"):  # the user goes on with the text
        assert escape(wrong[field]) in response.content.decode()
    assert not Schedule.objects.exists()


def test_a_queue_that_a_handler_does_not_allow_is_refused(boss):
    handler("shop.reports.daily", queue="mail", name="h", where={"tier": "gold"})(print)
    gold = {**FORM, "queue": "money", "metadata": '{"tier": "gold"}'}
    response = boss.post(url("schedule", "add"), gold)
    assert "allows only mail" in errors(response)["queue"][0]
    assert boss.post(url("schedule", "add"), {**gold, "metadata": "{}"}).status_code == 302


def filled_in(response):
    """Return what a browser would post of the form of a page."""
    found = {}
    for field in response.context["adminform"].form:
        value = field.value()
        if field.name != "enabled":
            found[field.html_name] = "" if value is None else value
        elif value:
            found[field.html_name] = "on"
        assert f'name="{field.html_initial_name}"' in response.content.decode()
        found[field.html_initial_name] = "" if value is None else value
    return found


@pytest.mark.parametrize("also", [{}, {"cron": "0 7 * * *"}], ids=["content", "timing"])
def test_stale_form_keeps_changes_of_another_user(boss, also):
    """A form that was opened before a schedule was disabled does not enable it again."""
    boss.post(url("schedule", "add"), FORM)
    form = filled_in(page(boss, "report"))
    press(boss, "disable", "report")
    Schedule.objects.update(cron="", every=timedelta(hours=1), queue="mail")
    edited = {**form, "payload": '{"n": 2}', **also}
    assert boss.post(url("schedule", "change", "report"), edited).status_code == 302
    now = Schedule.objects.get()
    assert (now.enabled, now.next_at, now.queue, now.payload) == (False, None, "mail", {"n": 2})
    assert (now.cron, now.every) == ((also["cron"], None) if also else ("", timedelta(hours=1)))


def test_edit_writes_only_the_changed_fields(boss):
    boss.post(url("schedule", "add"), FORM)
    before = Schedule.objects.get()
    form = page(boss, "report")
    assert "Save" in form.content.decode()
    # Now a worker broadcasts it.
    later = before.next_at + timedelta(days=1)
    Schedule.objects.update(last_at=before.next_at, next_at=later, last_message=7)
    changed = {**FORM, "payload": '{"n": 2}', "metadata": "{}"}
    assert boss.post(url("schedule", "change", "report"), changed).status_code == 302
    now = Schedule.objects.get()
    assert (now.payload, now.next_at, now.last_message) == ({"n": 2}, later, 7)


def test_edit_of_the_timing_moves_the_next_time(boss):
    boss.post(url("schedule", "add"), FORM)
    edited = {**FORM, "cron": "", "every": "60", "metadata": "{}"}
    assert boss.post(url("schedule", "change", "report"), edited).status_code == 302
    now = Schedule.objects.get()
    assert (now.cron, now.every) == ("", timedelta(minutes=1))
    assert timedelta(0) < now.next_at - now.created_at < timedelta(minutes=2)
    edited.pop("enabled")
    assert boss.post(url("schedule", "change", "report"), edited).status_code == 302
    now = Schedule.objects.get()
    assert (now.enabled, now.next_at) == (False, None)


def test_hidden_payload_survives_an_edit(keeper):
    keeper.post(url("schedule", "add"), FORM)
    edited = {**FORM, "payload": '{"n": 9}', "catch_up": "all"}
    assert keeper.post(url("schedule", "change", "report"), edited).status_code == 302
    now = Schedule.objects.get()
    assert (now.payload, now.catch_up) == ({"n": 1}, "all")


def test_a_schedule_of_the_code_is_not_edited(boss):
    put("report", source="code")
    assert "Save" not in text(page(boss, "report"))
    assert boss.post(url("schedule", "change", "report"), FORM).status_code == 403
    assert boss.post(url("schedule", "delete", "report"), {"post": "yes"}).status_code == 403
    assert Schedule.objects.get().type == "shop.ping"


def test_deleting_one_that_was_made_here(keeper):
    put("report")
    assert keeper.post(url("schedule", "delete", "report"), {"post": "yes"}).status_code == 302
    assert not Schedule.objects.exists()


def test_scope(monkeypatch, keeper):
    """A user restricted to some queues sees, runs and adds only schedules of those queues."""
    from django_mq.admin import ScheduleAdmin

    monkeypatch.setattr(ScheduleAdmin, "get_queues", lambda self, request: {"mail"})
    put("mine", queue="mail")
    put("another", queue="money")
    put("any")
    shown = text(keeper.get(url("schedule")))
    assert "mine" in shown
    assert "another" not in shown
    assert "any " not in shown.replace("many", "")
    assert press(keeper, "run", "another").status_code == 404
    for queue in ("", "money"):
        response = keeper.post(url("schedule", "add"), {**FORM, "queue": queue})
        assert "queue" in errors(response)
    assert keeper.post(url("schedule", "add"), {**FORM, "queue": "mail"}).status_code == 302


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_locked_row_ends_in_a_notice(boss):
    """S11: the notice comes after a second, and nothing is changed."""
    boss.post(url("schedule", "add"), FORM)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_schedule for update")
        edited = {**FORM, "metadata": "{}", "type": "shop.other"}
        for response in (
            press(boss, "disable", "report"),
            boss.post(url("schedule", "change", "report"), edited),
            boss.post(url("schedule", "delete", "report"), {"post": "yes"}),
        ):
            assert response.status_code == 302
            assert "Another session" in told(response)[-1]
    assert Schedule.objects.get().type == "shop.reports.daily"
    assert LogEntry.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("post", ["add", "change", "run", "enable", "disable", "delete"])
def test_another_session_is_faster(boss, post):
    """The schedule was added, or deleted, while the request waited for its row."""
    ways = {"add": ("add",), "change": ("change", "report"), "delete": ("delete", "report")}
    form = {**FORM, "metadata": "{}", "schedule": "report", "post": "yes"}
    if post != "add":
        boss.post(url("schedule", "add"), FORM)
    with second_connection() as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            if post == "add":
                other.execute(
                    "insert into django_mq_schedule (name, type, every)"
                    " values ('report', 'shop.other', '1 hour')"
                )
            else:
                other.execute("delete from django_mq_schedule")
            edited = {**form, "type": "shop.mine"}
            asked = pool.submit(boss.post, url("schedule", *ways.get(post, (post,))), edited)
            pool.submit(connections.close_all)
            until_any_blocked()
        response = asked.result()
    assert response.status_code == 302
    if post != "delete":
        assert "another session has just" in told(response)[-1]
    assert [each.type for each in Schedule.objects.all()] == ["shop.other"] * (post == "add")
