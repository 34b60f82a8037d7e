from django.apps import AppConfig


class AcceptanceConfig(AppConfig):
    name = "tests.acceptance.app"
    label = "acceptance"
