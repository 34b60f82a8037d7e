"""The nonce of the response's Content-Security-Policy, for the files that a page loads.

Django's context processor `csp` gives it to templates as `csp_nonce`. Django 6.1 has such a tag,
too, and uses it on the admin's own pages; earlier versions have neither.
"""

from __future__ import annotations

from typing import Any

import django
from django import template
from django.forms import Media
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()


@register.simple_tag(takes_context=True)
def mq_nonce(context: Any) -> str:
    """Return the attribute, after a space; empty if the templates of the project have no nonce."""
    nonce = context.get("csp_nonce")
    return "" if nonce is None else format_html(' nonce="{}"', nonce)


@register.simple_tag(takes_context=True)
def mq_media(context: Any, media: Media) -> SafeString:
    """Return the elements of `media`, with the nonce."""
    nonce = context.get("csp_nonce")
    if nonce is None or django.VERSION < (6, 1):
        return media.render()
    return media.render(attrs={"nonce": nonce})
