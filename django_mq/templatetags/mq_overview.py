"""The overview on pages that are not of this package: the index of the app in any admin site."""

from __future__ import annotations

from typing import Any

from django import template
from django.contrib.admin.sites import all_sites

from django_mq.models import Overview

register = template.Library()


@register.simple_tag(takes_context=True)
def mq_overview(context: Any) -> str:
    """Return the overview of the page's admin site; empty without one, or without the right."""
    request = context.get("request")
    name = getattr(request, "current_app", None)
    for site in all_sites:
        if site.name == name and site.is_registered(Overview):
            section: str = site.get_model_admin(Overview).section(request)  # type: ignore[attr-defined]
            return section
    return ""
