"""The app: at start it registers the checks and collects the handlers."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class DjangoMQConfig(AppConfig):
    """The app; `ready()` imports `handlers.py` of every installed app."""

    name = "django_mq"
    verbose_name = _("Message queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks and import every app's `handlers.py`; a broken one raises."""
        from django_mq import checks  # noqa: F401  (importing it registers the checks)

        autodiscover_modules("handlers")
