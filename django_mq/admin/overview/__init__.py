"""The overview of running, waiting and failed messages on one page."""

from django_mq.admin.overview.page import OverviewAdmin

__all__ = ["OverviewAdmin"]
