from django.apps import AppConfig


class ToolbarConfig(AppConfig):
    name = "tests.guests.toolbar"
    label = "toolbar"
