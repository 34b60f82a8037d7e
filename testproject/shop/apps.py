"""The app; django_mq imports its `handlers.py` at start."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "testproject.shop"
    label = "shop"
