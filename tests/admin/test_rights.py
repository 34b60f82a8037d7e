"""The permissions of the models, in the manual and in the security notes."""

from __future__ import annotations

import re

import pytest
from django.apps import apps

from tests.test_docs import ROOT

RIGHTS = {
    codename
    for model in apps.get_app_config("django_mq").get_models()
    for codename, _name in model._meta.permissions
}


def test_the_reference_has_each_permission_and_no_other():
    (section,) = re.findall(
        r"^## Permissions\n(.*?)^## ", (ROOT / "docs/reference.md").read_text(), re.M | re.S
    )
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == RIGHTS


@pytest.mark.parametrize("right", sorted(RIGHTS))
def test_the_security_notes_name_it(right):
    assert f"`{right}`" in (ROOT / "SECURITY.md").read_text()
