"""Screen readers and keyboards get names, headings of columns and the focus from the pages."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from django_mq import handler, handlers
from django_mq.models import HandledMessage, Result
from tests.admin.pages import LIST, act, fail, text, url
from tests.rows import add, beat

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

NAMED = re.compile(r'<(a|button)\b[^>]*\baria-label="([^"]*)"[^>]*>(.*?)</\1>', re.DOTALL)
LINES = "no order\n" * 100


def content(response):
    """Return the HTML of a page's main part."""
    assert response.status_code == 200
    return response.content.decode().partition('<div id="content"')[2]


def test_each_text_that_may_scroll_takes_the_focus(boss):
    """Not every browser lets the keyboard scroll a part of the page that cannot be focused."""
    message = add(dead=-5, last_error=LINES, payload={"n": 1}, attempts=1)
    attempt = fail(message, error_text=LINES, traceback=LINES)
    add(leased=60, attempts=1, last_error=LINES)
    result = Result.objects.create(message_id=1, error_class="KeyError", error_text=LINES)
    for address in (
        url("queuedmessage", "change", message.pk),
        url("failedattempt", "change", attempt.pk),
        url("failedattempt", "errors"),
        url("result", "change", result.pk),
    ):
        texts = re.findall(r'<pre class="mq-text"[^>]*>', content(boss.get(address)))
        assert texts, address
        assert all('tabindex="0"' in each for each in texts), address


def test_a_name_contains_the_words_on_the_button(boss):
    """Otherwise a user of speech input who says these words reaches nothing (WCAG 2.5.3)."""
    head = add(dead=-5, key="k")
    add(key="k", blocked_by=head.pk)
    fail(head)
    HandledMessage.objects.create(
        id=1, queue="mail", type="t", created_at=head.created_at, ended_at=head.created_at,
        keep_until=head.created_at,
    )  # fmt: skip
    beat("w", host="mail-1")
    for address in (
        f"{LIST}?queue=mail",
        url("handledmessage"),
        url("queuestate"),
        url("queuestate", "change", "mail"),
        url("failedattempt", "errors"),
        url("workerheartbeat"),
    ):
        found = NAMED.findall(content(boss.get(address)))
        assert found, address
        for _tag, name, inner in found:
            words = unescape(re.sub("<[^>]+>", "", inner)).strip(" …✖")
            assert words in unescape(name), (address, words, name)


def test_the_buttons_of_a_list_name_their_queue(boss):
    add("mail"), add("post")
    page = content(boss.get(url("queuestate")))
    for queue in ("mail", "post"):
        assert f'aria-label="Pause {queue}"' in page


def test_each_heading_of_a_column_has_a_scope(boss):
    message = add(dead=-5)
    page = content(act(boss, "discard", [message.pk]))
    assert "<thead>" in page
    assert "<th>" not in page


def test_each_section_of_a_message_is_named_by_its_heading(boss):
    message = add(dead=-5, payload={"n": 1}, metadata={"mq.causation_id": "1"}, attempts=1)
    fail(message)
    page = content(boss.get(url("queuedmessage", "change", message.pk)))
    ours = re.findall(r'<fieldset class="module mq-[^>]*>', page)
    assert ours
    for each in ours:
        id = re.search(r'aria-labelledby="([^"]+)"', each)
        assert id, each
        assert page.count(f'id="{id[1]}"') == 1


@pytest.mark.parametrize("page", ["broadcast", "edit"])
def test_the_title_of_a_form_with_errors_says_so(boss, page):
    """As in the stock admin: the title is what a screen reader reads first."""
    address = url("queuedmessage", page, *([add().pk] if page == "edit" else []))
    assert "<title>Error:" not in boss.get(address).content.decode()
    answer = boss.post(address, {"type": "", "payload": "{"})
    assert re.search(r"<title>\s*Error: ", answer.content.decode())


def test_the_label_of_a_required_field_is_marked(boss):
    page = content(boss.get(url("queuedmessage", "broadcast")))
    assert re.search(r'<label class="required" for="id_type"|for="id_type" class="required"', page)
    assert not re.search(r'<label[^>]*class="required"[^>]*for="id_queue"', page)


def test_the_table_of_types_that_takes_the_focus_has_a_name(boss):
    with handlers.isolated():
        handler("shop.orders.placed", name="mailer")(lambda delivery: None)
        page = content(boss.get(url("queuestate", "topology")))
    assert '<div class="module mq-wide" tabindex="0" role="region" aria-label=' in page


def test_a_chain_says_what_its_indents_show(boss):
    """How far each message is from the first cause (WCAG 1.3.1)."""
    first = add(type="a")
    chain = {"mq.correlation_id": f"{first.pk}"}
    second = add(type="b", metadata={"mq.causation_id": f"{first.pk}", **chain})
    third = add(type="c", metadata={"mq.causation_id": f"{second.pk}", **chain})
    page = text(boss.get(url("queuedmessage", "change", third.pk)))
    assert f"Causes and effects processable #{first.pk} a" in page
    assert f"level 1: processable #{second.pk} b" in page
    assert f"level 2: processable #{third.pk} c" in page


class Languages(HTMLParser):
    """Collects the texts of a page, each with the language that it is marked as."""

    VOID = frozenset({"input", "link", "meta", "img", "br", "wbr", "hr", "path", "rect", "col"})

    def __init__(self, page):
        super().__init__()
        self.inside, self.found = [("", "")], {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.inside.append((tag, dict(attrs).get("lang") or self.inside[-1][1]))

    def handle_endtag(self, tag):
        while tag not in self.VOID and self.inside.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if words := " ".join(data.split()):
            self.found[words] = self.inside[-1][1]


def test_sentences_are_marked_as_english_in_other_languages(boss, settings):
    """A screen reader would pronounce them by the rules of the page's language (WCAG 3.1.2)."""
    settings.LANGUAGE_CODE = "de"
    message = add(dead=-5, payload={"n": 1}, attempts=1)
    fail(message)
    for address, words in (
        (url("queuedmessage", "change", message.pk), "has been dead since"),
        (url("queuedmessage", "change", message.pk), "Payload"),
        (url("queuestate", "change", "mail"), "no limit"),
        (url("queuestate"), "Counts stop at"),
        (url("failedattempt", "errors"), "Traceback of the newest attempt"),
        ("/admin/django_mq/", "As of"),
    ):
        found = Languages(boss.get(address).content.decode()).found
        assert {found[each] for each in found if words in each} == {"en"}, (address, words)


def test_terms_of_django_keep_their_language(boss, settings):
    settings.LANGUAGE_CODE = "de"
    page = act(boss, "discard", [add(dead=-5).pk]).content.decode()
    found = Languages(page).found
    assert found["Nein, bitte abbrechen"] == "de"
    assert found["Start"] == "de"
