"""A cache in front of the site that only records invalidations."""

from wagtail.contrib.frontend_cache.backends import BaseBackend

purged: list[str] = []


class NotedCache(BaseBackend):
    def purge(self, url: str) -> None:
        purged.append(url)
