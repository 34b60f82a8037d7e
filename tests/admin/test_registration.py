"""The setting ADMIN, and the classes that it registers."""

import re

import pytest
from django.contrib import admin

from django_mq import admin as ours
from django_mq.admin import messages
from django_mq.models import QueuedMessage, QueueState, UniqueKey


def test_admin_registers_itself_unless_it_is_turned_off(settings):
    assert isinstance(admin.site.get_model_admin(QueuedMessage), ours.QueuedMessageAdmin)
    assert isinstance(admin.site.get_model_admin(UniqueKey), ours.UniqueKeyAdmin)
    assert ours._is_wanted()
    settings.DJANGO_MQ = {"ADMIN": False}
    assert not ours._is_wanted()


@pytest.mark.parametrize("wrong", [{"ADMIN": "yes"}, {"NO_SUCH": 1}, 7])
def test_wrong_settings_are_left_to_the_system_checks(settings, wrong):
    settings.DJANGO_MQ = wrong
    assert not ours._is_wanted()


def test_a_site_without_messages_shows_queues_all_the_same(rf, boss):
    """Links without a target are left out."""
    request = rf.get("/")
    request.user = boss.user
    alone = ours.QueueStateAdmin(QueueState, admin.AdminSite("alone"))
    assert alone.offered(request, "dead") == []
    registered = admin.site.get_model_admin(QueueState)
    assert [each.name for each, _ in registered.offered(request, "dead")] == ["requeue", "discard"]


def test_themes_find_the_name_of_every_filter():
    """Unfold reads it, to look up options of the filter, from one of these attributes."""
    nameless = [
        each
        for registered in admin.site._registry.values()
        if type(registered).__module__.startswith("django_mq.")
        for each in registered.list_filter
        if isinstance(each, type)
        and not (getattr(each, "field_path", "") or getattr(each, "parameter_name", ""))
    ]
    assert nameless == []


def test_the_module_of_messages_names_every_part_of_their_admin():
    kinds = messages.QueuedMessageAdmin.__mro__[1:]
    own = [each.__name__ for each in kinds if each.__module__.startswith("django_mq.")]
    assert re.findall(r"^- `(\w+)`", messages.__doc__, re.MULTILINE) == own
