"""Addresses, and the text of pages."""

from __future__ import annotations

import csv
import html
import io
import json
import re

from django.contrib.admin.utils import quote
from django.contrib.messages import get_messages
from django.urls import reverse

from django_mq.models import FailedAttempt

MODELS = (
    "queuedmessage",
    "failedattempt",
    "handledmessage",
    "operation",
    "queuestate",
    "result",
    "schedule",
    "uniquekey",
    "workerheartbeat",
)


def url(model, page="changelist", *args):
    if page != "action":
        args = [quote(str(each)) for each in args]
    return reverse(f"admin:django_mq_{model}_{page}", args=args)


LIST = "/admin/django_mq/queuedmessage/"


def act(client, action, ids, **more):
    """Post an action of the list of messages."""
    data = {"action": action, "_selected_action": list(ids), "index": "0", **more}
    return client.post(LIST + more.pop("query", ""), data)


def confirm(client, action, ids, **more):
    """Post to the address that the confirmation page posts to."""
    data = {"ids": ",".join(map(str, ids)), "confirmed": "yes", **more}
    return client.post(url("queuedmessage", "action", action), data)


def text(response):
    """Return the text of a page, without tags."""
    page = response.content.decode().replace("<wbr>", "")
    found = re.sub(r"<script.*?</script>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(found))


def exported(response, kind):
    """Return the rows of an exported file."""
    assert response.status_code == 200
    content = b"".join(response.streaming_content).decode()
    return json.loads(content) if kind == "json" else list(csv.DictReader(io.StringIO(content)))


def told(response):
    """Return the notices that a redirect carries."""
    return [str(each) for each in get_messages(response.wsgi_request)]


def listed(response):
    """Return the ids of the messages in a list."""
    return [message.pk for message in response.context["cl"].result_list]


def fail(message, attempt=1, **more):
    more = {"error_class": "ValueError", "error_text": "no", "traceback": "Traceback: 1\n", **more}
    return FailedAttempt.objects.create(
        message_id=message.pk, queue=message.queue, type=message.type, attempt=attempt, **more
    )
