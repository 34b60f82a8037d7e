"""Wagtail's own tasks run on this backend, and the guide's recipe passes its signal on."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

from django.contrib.auth import get_user_model
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.core.management import call_command
from django.test import TransactionTestCase
from django.urls import reverse
from django.utils import timezone
from wagtail.documents.models import Document
from wagtail.models import Collection, Locale, Page, ReferenceIndex, Site

from django_mq.models import QueuedMessage
from django_mq.worker import Worker
from tests.guests.cms import cache
from tests.guests.cms.models import HomePage

PUBLISHED, CREATED = "cms.pages.published", "accounts.users.created"
REFERENCES = "tasks.wagtail.tasks.update_reference_index_task"
SEARCH = "tasks.modelsearch.tasks.insert_or_update_object_task"
PURGE = "tasks.wagtail.contrib.frontend_cache.tasks.purge_urls_from_cache_task"
DELETE_FILE = "tasks.wagtail.tasks.delete_file_from_storage_task"


def types() -> list[str]:
    return sorted(set(QueuedMessage.objects.values_list("type", flat=True)))


def work() -> None:
    assert Worker(max_seconds=120).run(until_empty=True)


class WagtailTests(TransactionTestCase):
    def setUp(self) -> None:
        cache.purged.clear()
        user = get_user_model().objects.create_superuser("ada", "ada@example.com", "secret")
        self.client.force_login(user)
        # Django empties the tables after each test, including rows that Wagtail's migrations wrote.
        if not Collection.objects.exists():
            Collection.add_root(name="Root")
        Locale.objects.get_or_create(language_code="en")
        root = Page.add_root(title="Root")
        self.home = root.add_child(instance=HomePage(title="Home", live=False))
        Site.objects.create(hostname="testserver", root_page=self.home, is_default_site=True)
        work()
        # Users have no handler here: the recipe's message waits for one.
        assert types() == [CREATED]
        QueuedMessage.objects.all().delete()

    def document(self) -> Document:
        made = Document.objects.create(title="notes", file=ContentFile(b"notes", "notes.txt"))
        assert isinstance(made, Document)
        return made

    def publish(self, **values: Any) -> None:
        url = reverse("wagtailadmin_pages:edit", args=[self.home.pk])
        form = {
            "title": "Home",
            "slug": "home",
            "body": '{"entityMap": {}, "blocks": []}',
            "notes": "",
            "comments-TOTAL_FORMS": "0",
            "comments-INITIAL_FORMS": "0",
            "action-publish": "1",
            **values,
        }
        answer = self.client.post(url, form)
        assert answer.status_code == 302, answer.content.decode()

    def test_publishing_in_the_admin(self) -> None:
        document = self.document()
        self.publish(notes=document.pk)
        assert {PUBLISHED, REFERENCES, PURGE} <= set(types())
        assert not ReferenceIndex.get_references_to(document).exists()
        assert not cache.purged
        # The recipe: content, key and metadata match the guide.
        (message,) = QueuedMessage.objects.filter(type=PUBLISHED)
        revision = HomePage.objects.get().live_revision_id
        assert message.payload == {"page_id": self.home.pk, "revision_id": revision}
        assert (message.key, message.metadata["model"]) == (f"page/{self.home.pk}", "cms.homepage")
        work()
        assert types() == [PUBLISHED]
        assert ReferenceIndex.get_references_to(document).exists()
        assert cache.purged == ["http://testserver/"]
        usage = self.client.get(reverse("wagtaildocs:document_usage", args=[document.pk]))
        self.assertContains(usage, "Home")

    def test_the_file_of_a_deleted_document(self) -> None:
        document = self.document()
        work()
        name = document.file.name
        url = reverse("wagtaildocs:delete", args=[document.pk])
        assert self.client.post(url).status_code == 302
        assert DELETE_FILE in types()
        assert default_storage.exists(name)
        work()
        assert not default_storage.exists(name)
        assert types() == []

    def test_deleted_document_fails_only_its_own_tasks(self) -> None:
        gone, stays = self.document(), self.document()
        number = gone.pk
        gone.delete()
        self.publish(notes=stays.pk)
        work()
        dead = QueuedMessage.objects.filter(dead_at__isnull=False)
        assert {each.type for each in dead} == {REFERENCES, SEARCH}
        for each in dead:
            assert each.payload["args"][2:] == [str(number)], each.payload
            assert "DoesNotExist" in each.last_error
        assert ReferenceIndex.get_references_to(stays).exists()

    def test_pages_published_by_the_command(self) -> None:
        soon = timezone.now() - timedelta(minutes=1)
        self.home.go_live_at = soon
        self.home.save_revision(approved_go_live_at=soon)
        call_command("publish_scheduled", stdout=StringIO())
        assert QueuedMessage.objects.filter(type=PUBLISHED).count() == 1
        work()
        assert types() == [PUBLISHED]
        assert HomePage.objects.get().live

    def test_pages_of_this_package_and_of_wagtail(self) -> None:
        self.publish()
        for url in (
            reverse("wagtailadmin_home"),
            reverse("wagtailadmin_explore", args=[self.home.pk]),
            reverse("wagtailadmin_reports:site_history"),
            reverse("admin:django_mq_queuedmessage_changelist"),
            reverse(
                "admin:django_mq_queuedmessage_change", args=[QueuedMessage.objects.first().pk]
            ),
        ):
            assert self.client.get(url).status_code == 200, url
        listed = self.client.get(reverse("admin:django_mq_queuedmessage_changelist"))
        self.assertContains(listed, REFERENCES)
        assert self.client.get("/").status_code == 200


class RecipeTests(TransactionTestCase):
    def test_a_user_of_the_command(self) -> None:
        call_command(
            "createsuperuser", interactive=False, username="ada", email="a@b.de", verbosity=0
        )
        (message,) = QueuedMessage.objects.filter(type=CREATED)
        assert message.payload == {"user_id": get_user_model().objects.get().pk}
