"""Pages beside the stock ones: their routes, their URLs and their common context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import django
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import Model
from django.http import HttpRequest, QueryDict
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse

from django_mq.admin.bounds import View, limited_posts

if TYPE_CHECKING:
    StockAdmin = admin.ModelAdmin[Any]
else:
    StockAdmin = admin.ModelAdmin


def own_page(model: type[Model] | None, page: str, route: str) -> Callable[[View], View]:
    """Give a view a route beside the stock pages of `model`, by default the model of its class.

    `OwnPagesAdmin.url()` finds the page by its name.
    """

    def mark(view: View) -> View:
        view.own_page = (model, page, route)  # type: ignore[attr-defined]
        return view

    return mark


class OwnPagesAdmin(StockAdmin):
    """An admin with pages of its own: the views that `own_page()` marks."""

    def get_urls(self) -> list[Any]:
        """Return the routes of the views marked by `own_page()`, then the stock ones."""
        marked = (
            (*view.own_page, getattr(self, name))
            for kind in type(self).__mro__
            for name, view in vars(kind).items()
            if hasattr(view, "own_page")
        )
        pages = [self.page(model or self.model, *rest) for model, *rest in marked]
        return [*pages, *super().get_urls()]

    def page(
        self, model: type[Model], page: str, route: str, view: Callable[..., HttpResponseBase]
    ) -> URLPattern:
        """Return the route of a page of `model` beside the stock ones; `url()` finds it."""
        name = f"{model._meta.app_label}_{model._meta.model_name}_{page}"
        return path(route, self.admin_site.admin_view(limited_posts(self, view)), name=name)

    def url(self, model: type[Model], page: str, *args: object, **query: object) -> str:
        """Return the URL of a page of `model`, empty if this site has no such page."""
        name = f"{self.admin_site.name}:{model._meta.app_label}_{model._meta.model_name}_{page}"
        is_stock = page in ("change", "history")  # these views unquote the key of a row
        try:
            address = reverse(name, args=[quote(str(each)) if is_stock else each for each in args])
        except NoReverseMatch:  # the site has no admin for the model, or one of the project's own
            return ""
        return f"{address}?{urlencode(query)}" if query else address

    def list_url(self, filters: str) -> str:
        """Return the list's URL with `filters`, parsed again so that it cannot leave the site."""
        query = QueryDict(filters).urlencode()
        return self.url(self.model, "changelist") + (f"?{query}" if query else "")

    def show_page(
        self, request: HttpRequest, template: str, title: str, /, **context: Any
    ) -> TemplateResponse:
        """Return a page that has no stock template; it links to the list unless it `is_list`."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": title,
            "crumbs_are_list": django.VERSION >= (6, 1),
            "list_url": self.url(self.model, "changelist"),
            **context,
        }
        return TemplateResponse(request, f"admin/django_mq/{template}.html", context)
