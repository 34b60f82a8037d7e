"""The overview: what runs, what waits, and what went wrong, on one page."""

from django_mq.admin.overview.page import OverviewAdmin

__all__ = ["OverviewAdmin"]
