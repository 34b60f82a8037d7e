"""Shared settings of all guest projects: the database, Django's own apps, and this package."""

from typing import Any

from testproject.settings import (
    DATABASES,
    DEFAULT_AUTO_FIELD,
    LANGUAGE_CODE,
    MIDDLEWARE,
    SECRET_KEY,
    STATIC_URL,
    TEMPLATES,
    TIME_ZONE,
    USE_TZ,
)

__all__ = [
    "ALLOWED_HOSTS",
    "DATABASES",
    "DEFAULT_AUTO_FIELD",
    "INSTALLED_APPS",
    "LANGUAGE_CODE",
    "MIDDLEWARE",
    "PASSWORD_HASHERS",
    "SECRET_KEY",
    "STATIC_URL",
    "TASKS",
    "TEMPLATES",
    "TIME_ZONE",
    "USE_TZ",
]

ALLOWED_HOSTS = ["testserver", "localhost"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
INSTALLED_APPS: list[Any] = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_mq",
]
TASKS = {"default": {"BACKEND": "django_mq.contrib.tasks.MessageQueueBackend", "QUEUES": []}}
