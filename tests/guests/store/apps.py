from django.apps import AppConfig


class StoreConfig(AppConfig):
    name = "tests.guests.store"
    label = "store"

    def ready(self) -> None:
        from tests.guests.store import receivers  # noqa: F401
