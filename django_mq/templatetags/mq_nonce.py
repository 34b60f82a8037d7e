"""The nonce of the response's Content-Security-Policy, on what pages load.

Templates have it as `csp_nonce` with Django's context processor `csp`. Django 6.1 has a tag for the
same; its own pages of the admin have no nonces before.
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
