"""The overview: its content, permissions and cost."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.db import OperationalError, connection
from django.db.models.functions import Now, Trunc
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_mq.admin import OverviewAdmin, QueueScopeMixin, QueueStateAdmin
from django_mq.admin.overview import page as overview
from django_mq.admin.overview.charts import charts
from django_mq.models import MinuteFigures, Overview, QueueState, Schedule
from django_mq.queues import figures, message_counts
from django_mq.store import estimates as sampled
from tests.admin.pages import fail, text, url
from tests.rows import add, add_all, beat, decide, insert_all

pytestmark = pytest.mark.django_db

PAGE = "/admin/django_mq/overview/"
INDEX = "/admin/django_mq/"


def minute(ago=0, queue="mail", handler="shop.send", **given):
    at = Trunc(Now() - timedelta(minutes=ago), "minute")
    MinuteFigures.objects.create(minute=at, worker=f"w{ago}", queue=queue, handler=handler, **given)


def busy(response):
    """Return the names of the queues in the order of the page."""
    return [each.row.counts.queue for each in response.context["busy"]]


def live(client, **query):
    return client.get(PAGE, {"part": "live", **query})


# ---- content


def test_queues_by_the_age_of_their_oldest(boss):
    add("young", after=-5), add_all([{"queue": "young", "after": -4}] * 5)
    add("old", after=-4000), add("delayed", after=60), add("dead", dead=-60)
    response = live(boss)
    assert busy(response) == ["old", "young", "delayed", "dead"]
    words = text(response)
    assert "1 h 6 min" in words
    assert "no worker" in words
    assert "Idle: default" in words


def test_states_are_always_counted(boss):
    add(), add("post"), add(after=60), add("post", dead=-60)
    tiles = {tile["name"]: tile for tile in live(boss).context["tiles"]}
    assert {name: tile["text"] for name, tile in tiles.items() if tile["text"] != "0"} == {
        "processable": "2", "delayed": "1", "dead": "1"
    }  # fmt: skip
    assert tiles["dead"]["url"].endswith("queuedmessage/?state=dead")
    assert tiles["held"]["url"] == ""
    for tile in tiles.values():
        if tile["url"]:
            assert boss.get(tile["url"]).status_code == 200


def test_rates_and_when_a_queue_is_empty(boss):
    minute(1, acked=2400, broadcast=300)
    insert_all([{"created": -3600}] * 70)
    add("stopped", created=-3600), decide("stopped", paused=-5)
    mail, stopped = live(boss).context["busy"]
    assert mail.incoming.endswith("/s")
    assert mail.outgoing.endswith("/s")
    assert mail.empty_in in ("2 s", "3 s", "4 s")
    assert (stopped.incoming, stopped.outgoing, stopped.empty_in) == ("", "", "never")


def test_errors_of_the_last_hour_are_shown(boss):
    message = add(dead=-60)
    add(dead=-7200)
    for number in range(3):
        fail(message, number + 1, error_class="KeyError")
    fail(message, 4, error_class="shop.OutOfStock")
    Schedule.objects.create(name="nightly", type="t", every=timedelta(1), last_error="Boom: no")
    words = text(live(boss))
    assert "In the last hour: dead letters 1 , failed attempts 4" in words
    assert "KeyError 3 shop.OutOfStock 1" in words
    assert "schedule failed nightly Boom: no" in words


def test_workers_alive_and_gone(boss):
    beat("w1", running=[1, 2]), beat("w2", wakeup="degraded", draining=True)
    beat("w3", seen=-60, host="lost", pid=9, threads=1, threads_used=1.0)
    words = text(live(boss))
    assert "2 workers , running 2 messages, 1 draining, 1 cannot listen" in words
    assert "gone lost:9" in words


def test_how_busy_the_workers_are(boss):
    """On average over those that have reported it."""
    for share in (0.25, 0.75):
        beat(f"w{share}", threads=1, threads_used=share)
    beat("old")
    assert "3 workers , 50% busy" in text(live(boss))


@pytest.mark.parametrize("span", ["hour", "day", "week"])
def test_charts_and_table_show_the_same_figures(boss, span):
    minute(2, acked=1234, failed=7, retried=6, dead=1, ran={"40": 9}, waited={"54": 9})
    response = live(boss, span=span)
    page = response.content.decode()
    assert page.count("<svg") == 4
    assert page.count('role="img"') == 4
    assert "style=" not in page  # a strict policy lets no inline style in
    assert "1,234" in page
    assert "p50 8.91 ms, p95 8.91 ms, p99 8.91 ms" in page
    [step] = response.context["steps"]
    assert [count for _, count in step["labelled"]] == ["0", "1,234", "6", "1"]
    [handler] = response.context["handlers"]
    assert (handler["queue"], handler["handler"]) == ("mail", "shop.send")
    assert handler["counts"] == ["1,234", "7", "1"]
    assert f'href="?span={span}" aria-current="true"' in page


def test_invalid_span_is_an_hour(boss):
    assert live(boss, span="x\x00").context["span"] == "hour"


def test_an_empty_chart_is_still_drawn():
    for chart in charts(figures()):
        assert chart["box"] == "0 0 600 120"
        assert len(chart["hits"]) == 60
        drawn = [shape["path"] for shape in chart["shapes"] if shape["name"] != "broadcast"]
        assert not any(drawn)


def test_a_depth_beyond_the_count_is_an_estimate(boss, monkeypatch):
    """It is marked as an estimate; if there is none, the page says what was counted."""
    monkeypatch.setattr(message_counts, "MAX_COUNT", 50)
    insert_all([{"created": -3600}] * 800 + [{"queue": "small"}] * 40 + [{"dead": -60}] * 20)
    with monkeypatch.context() as patch:
        patch.setattr(sampled, "estimates", lambda cursor, queues: {each: {} for each in queues})
        assert live(boss).context["busy"][0].depth == "> 50"
    minute(1, acked=12000)
    mail, small = live(boss).context["busy"]
    assert mail.depth == "≈ 800"
    assert mail.empty_in.startswith("≈ ")
    assert small.depth == "40"


# ---- address


def test_it_is_at_the_top_of_the_index_and_a_page_of_its_own(boss):
    add("findme")
    for address in (INDEX, PAGE):
        page = boss.get(address)
        assert "findme" in text(page)
        assert 'data-mq-url="/admin/django_mq/overview/"' in page.content.decode()
    assert url("queuedmessage") in boss.get(INDEX).content.decode()  # the list of models
    part = live(boss).content.decode()
    assert "findme" in part
    assert "<html" not in part
    assert "findme" not in text(boss.get("/admin/"))


def test_it_has_no_pages_of_rows(boss):
    minute(acked=1)
    row = MinuteFigures.objects.get()
    for more in (f"{row.pk}/change/", f"{row.pk}/delete/", "add/"):
        assert boss.get(f"{PAGE}{more}").status_code == 404


class Own(QueueScopeMixin):
    def get_queues(self, request):
        return {"mine"}


site = admin.AdminSite(name="own")
site.register(Overview, type("OwnOverview", (Own, OverviewAdmin), {}))
site.register(QueueState, type("OwnQueues", (Own, QueueStateAdmin), {}))
bare = admin.AdminSite(name="bare")
bare.register(QueueState, QueueStateAdmin)
urlpatterns = [
    path("own/", site.urls),
    path("bare/", bare.urls),
    path("admin/", admin.site.urls),
]


@override_settings(ROOT_URLCONF=__name__)
def test_another_site_shows_its_own_or_none(boss):
    """A user restricted to some queues sees nothing of the others (S33)."""
    add("mine"), add("theirs", dead=-5), fail(add("theirs"), error_class="TheirError")
    fail(add("mine"), error_class="MyError")
    minute(queue="theirs", handler="their.handler", acked=9)
    minute(1, queue="mine", handler="my.handler", acked=9)
    beat("w1", queues=["theirs"], host="their-host", running=[1])
    Schedule.objects.create(name="theirs", type="t", every=timedelta(1), last_error="no")
    for address in ("/own/django_mq/", "/own/django_mq/overview/"):
        page = boss.get(address)
        words = page.content.decode()
        assert "mine" in words
        assert "MyError" in words
        assert "my.handler" in words
        assert "theirs" not in words.replace("theirs/", "").lower()
        assert "their" not in words.lower()
    assert "mq-live" not in boss.get("/bare/django_mq/").content.decode()


# ---- permissions


def test_overview_needs_permission_to_view_queues(login):
    client = login("view_result")
    assert client.get(PAGE).status_code == 403
    index = client.get(INDEX)
    assert index.status_code == 200
    assert "mq-live" not in index.content.decode()
    assert Client().get(PAGE).status_code == 302


def test_links_and_texts_need_their_rights(login):
    add(dead=-5), beat()
    fail(add(), error_class="KeyError")
    Schedule.objects.create(name="nightly", type="t", every=timedelta(1), last_error="Boom: no")
    page = live(login("view_queuestate")).content.decode()
    for model in ("queuedmessage", "failedattempt", "workerheartbeat", "schedule"):
        assert f"/{model}/" not in page
    assert "KeyError" in page
    assert "nightly" not in page
    page = live(login("view_queuestate", "view_schedule", name="bob")).content.decode()
    assert "nightly" in page
    assert "Boom" not in page


# ---- cost


def test_it_costs_few_queries_whatever_there_is(boss):
    insert_all([{"queue": f"q{n}"} for n in range(60)])
    for n in range(30):
        minute(n, queue=f"q{n}", acked=1, ran={"40": 1})
        beat(f"w{n}")
    for address in (INDEX, PAGE, f"{PAGE}?part=live&span=week"):
        with CaptureQueriesContext(connection) as queries:
            assert boss.get(address).status_code == 200
        assert len(queries) <= 20, address
    response = live(boss)
    assert len(response.context["busy"]) == overview.LISTED
    assert "more queues" in text(response)
    assert len(response.context["handlers"]) == overview.HANDLERS
    assert "and 5 more handlers" in text(response)


def test_a_database_that_takes_too_long_spoils_no_page(boss, monkeypatch):
    """The app's index links to all its other pages."""

    def slow(cursor):
        cursor.execute("set local statement_timeout = 50")
        cursor.execute("select pg_sleep(60)")

    monkeypatch.setattr(overview, "prepare_to_read", slow)
    for address in (INDEX, PAGE):
        page = boss.get(address)
        assert "took too long" in text(page)
    assert url("queuestate") in page.content.decode() or address == PAGE

    def broken(cursor):
        raise OperationalError("no such server")

    monkeypatch.setattr(overview, "prepare_to_read", broken)
    with pytest.raises(OperationalError, match="no such server"):
        boss.get(PAGE)
