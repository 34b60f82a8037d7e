from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import include, path

from django_mq import Message, broadcast_many
from tests.guests.toolbar.tasks import add


def always(request: HttpRequest) -> bool:
    return True


def enqueue(request: HttpRequest) -> HttpResponse:
    """Write messages in every way: one row, one statement, COPY."""
    with transaction.atomic():
        result = add.using(priority=7).enqueue(1, second=2)
        broadcast_many([Message("toolbar.pages.seen", {"n": n}) for n in range(2000)])
    return HttpResponse(f"<body>{result.id}</body>")


async def aenqueue(request: HttpRequest) -> HttpResponse:
    result = await add.aenqueue(3, 4)
    return HttpResponse(f"<body>{result.id}</body>")


urlpatterns = [
    path("admin/", admin.site.urls),
    path("enqueue/", enqueue),
    path("aenqueue/", aenqueue),
    path("__debug__/", include("debug_toolbar.urls")),
]
