"""A strict Content-Security-Policy: no page has inline code or styles, whatever it shows.

Under a policy that names no origin, only elements with the nonce of the response load.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import django
import pytest
from django.urls import reverse

import django_mq
from django_mq.models import Operation, Result
from tests.admin.pages import LIST, MODELS, fail, url
from tests.rows import add, beat, decide
from tests.slow import slow

pytestmark = pytest.mark.django_db


class Inline(HTMLParser):
    """Collects everything that a policy without 'unsafe-inline' refuses."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        data = given.get("type") == "application/json"
        if tag == "style" or (tag == "script" and "src" not in given and not data):
            self.found.append(f"<{tag}>")
        self.found += [f"{name} of <{tag}>" for name in given if name == "style"]
        self.found += [f"{name} of <{tag}>" for name in given if name.startswith("on")]
        self.found += [
            f"{name} of <{tag}>"
            for name, value in attrs
            if name in ("href", "src", "action", "formaction")
            and (value or "").strip().lower().startswith("javascript:")
        ]


def inline(response):
    assert response.status_code == 200
    parser = Inline()
    parser.feed(response.content.decode())
    return parser.found


@pytest.mark.parametrize("query", ["", *slow("?q=nosuch", "?o=1")])
def test_no_page_has_inline_code_or_styles(boss, query):
    message = add(dead=-5, last_error="<b onclick=x>", key="k", payload={"a": "<script>"})
    add(key="k", blocked_by=message.pk)
    attempt = fail(message, error_class="<style>")
    Result.objects.create(message_id=message.pk, handler="h", value=1)
    decide("mail", paused=-5)
    beat("worker")
    pages = [url(model) + ("" if model == "schedule" else query) for model in MODELS]
    pages += [
        url("queuedmessage", "change", message.pk),
        url("failedattempt", "change", attempt.pk),
        url("result", "change", message.pk),
        url("queuestate", "change", "mail"),
        LIST + "?queue=mail&type=t*&created_at_from=24h&error_class=KeyError",
        url("workerheartbeat", "change", "worker"),
        reverse("admin:app_list", args=["django_mq"]),
    ]
    assert {page: found for page in pages if (found := inline(boss.get(page)))} == {}
    asked = boss.post(LIST, {"action": "discard", "_selected_action": [message.pk], "index": "0"})
    assert inline(asked) == []


# ---- nonces


class Nonces(HTMLParser):
    """Collects the nonces of scripts and styles, by what they load."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        data = given.get("type") == "application/json"
        if tag == "style" or (tag == "script" and not data) or given.get("rel") == "stylesheet":
            self.found[given.get("src") or given.get("href") or tag] = given.get("nonce")


def nonces(response):
    assert response.status_code == 200
    parser = Nonces()
    parser.feed(response.content.decode())
    return parser.found


def test_templates_put_the_nonce_on_all_that_they_load():
    loading = re.compile(r"<script\b[^>]*>|<style\b[^>]*>|<link\b[^>]*stylesheet[^>]*>")
    for template in sorted(Path(django_mq.__file__).parent.glob("templates/**/*.html")):
        for tag in loading.findall(template.read_text()):
            assert "application/json" in tag or "{% mq_nonce %}" in tag, (template, tag)


def pages_with_their_own_files():
    """Return one page of each template that loads scripts or styles."""
    message = add(dead=-5)
    add(dead=-4)
    waiting = add(after=600)
    operation = Operation.objects.create(action="cancel", filter={}, last_id=9, matched=9)
    return [
        LIST,
        url("failedattempt"),
        url("handledmessage"),
        url("operation"),
        url("queuestate"),
        url("workerheartbeat"),
        url("overview"),
        url("operation", "change", operation.pk),
        url("queuedmessage", "change", message.pk),
        url("queuedmessage", "broadcast"),
        url("queuedmessage", "edit", waiting.pk),
        url("failedattempt", "errors"),
        reverse("admin:app_list", args=["django_mq"]),
    ]


@pytest.mark.skipif(django.VERSION < (6, 1), reason="the stock admin has no nonces")
def test_everything_that_a_page_loads_has_the_nonce_of_the_response(boss, settings):
    from django.utils.csp import CSP

    csp = "django.template.context_processors.csp"
    [engine] = settings.TEMPLATES
    processors = [*engine["OPTIONS"]["context_processors"], csp]
    settings.TEMPLATES = [{**engine, "OPTIONS": {"context_processors": processors}}]
    settings.MIDDLEWARE = [
        "django.middleware.csp.ContentSecurityPolicyMiddleware",
        *settings.MIDDLEWARE,
    ]
    settings.SECURE_CSP = {"script-src": [CSP.NONCE]}
    for page in pages_with_their_own_files():
        response = boss.get(page)
        [nonce] = set(nonces(response).values())
        assert nonce, page
        assert f"'nonce-{nonce}'" in response["Content-Security-Policy"]
        assert any("django_mq/admin" in each for each in nonces(response)), page


def test_without_a_nonce_the_attribute_is_left_out(boss):
    for page in pages_with_their_own_files():
        assert set(nonces(boss.get(page)).values()) == {None}
