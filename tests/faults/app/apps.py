from django.apps import AppConfig


class FaultsConfig(AppConfig):
    name = "tests.faults.app"
    label = "faults"
