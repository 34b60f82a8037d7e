"""The toolbar's panels show what a request enqueued, and nothing breaks under its wrappers."""

from __future__ import annotations

import re
from unittest import skipIf

import django
from django.contrib.auth import get_user_model
from django.http import HttpResponse
from django.test import TransactionTestCase
from django.urls import reverse

from django_mq.models import QueuedMessage
from django_mq.worker import Worker
from tests.guests.toolbar.tasks import add

PATH = "tests.guests.toolbar.tasks.add"


class ToolbarTests(TransactionTestCase):
    def panel(self, answer: HttpResponse, name: str) -> str:
        """Return the content of a panel for the request with this response."""
        found = re.search(r'data-request-id="(\w+)"', answer.content.decode())
        assert found, answer.content.decode()
        shown = self.client.get(
            "/__debug__/render_panel/", {"request_id": found[1], "panel_id": name}
        )
        content: str = shown.json()["content"]
        return content

    @skipIf(django.VERSION < (6, 0), "the panel of tasks needs Django 6")
    def test_the_panel_of_tasks(self) -> None:
        shown = self.panel(self.client.get("/enqueue/"), "TasksPanel")
        for each in (PATH, "default", "7", "READY", "[1]", "second"):
            assert each in shown, shown
        shown = self.panel(self.client.get("/aenqueue/"), "TasksPanel")
        assert PATH in shown
        assert "[3, 4]" in shown

    def test_tasks_are_stored_and_run(self) -> None:
        answer = self.client.get("/enqueue/")
        [id] = re.findall(r"<body>(\d+)", answer.content.decode())
        assert QueuedMessage.objects.count() == 2001
        QueuedMessage.objects.filter(type="toolbar.pages.seen").delete()
        assert Worker(max_seconds=120).run(until_empty=True)
        assert add.get_result(id).return_value == 3

    def test_the_panel_of_sql(self) -> None:
        assert "django_mq_queuedmessage" in self.panel(self.client.get("/enqueue/"), "SQLPanel")

    def test_pages_of_the_admin(self) -> None:
        self.client.force_login(get_user_model().objects.create_superuser("ada"))
        add.enqueue(1, 2)
        [message] = QueuedMessage.objects.all()
        for url in (
            reverse("admin:django_mq_queuedmessage_changelist"),
            reverse("admin:django_mq_queuedmessage_change", args=[message.pk]),
        ):
            answer = self.client.get(url)
            self.assertContains(answer, PATH)
            assert "select" in self.panel(answer, "SQLPanel").lower()
