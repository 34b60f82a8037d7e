"""The figures as a page. It requires no login: protect it in your URL configuration."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from django_mq.contrib.prometheus.collector import QueueCollector


@never_cache
@require_safe
def metrics(request: HttpRequest, using: str | None = None) -> HttpResponse:
    """Return the figures of all queues, in the format that the scraper accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(QueueCollector(using))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)
