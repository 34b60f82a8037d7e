from django.apps import AppConfig


class CmsConfig(AppConfig):
    name = "tests.guests.cms"
    label = "cms"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from tests.guests.cms import receivers  # noqa: F401
