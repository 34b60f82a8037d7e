"""Settings of the test project: the only place that reads the environment.

| variable        | default      | meaning                                                       |
|-----------------|--------------|---------------------------------------------------------------|
| `DATABASE_URL`  | none         | the PostgreSQL to use, `postgresql://user:password@host/name` |
| `POSTGRES_DIR`  | `.postgres`  | otherwise, with `DEBUG`: data of a private server             |
| `EMAIL_URL`     | none: files  | server of the shop's letters, `smtp://user:password@host:587` |
| `DEBUG`         | true         |                                                               |
| `SECRET_KEY`    | with `DEBUG` | required without it                                           |
| `ALLOWED_HOSTS` | none         | separated by commas                                           |

Raises ImproperlyConfigured without `DEBUG` if `DATABASE_URL` or `SECRET_KEY` is missing.
"""

from pathlib import Path

import environ
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

DEBUG = env.bool("DEBUG", default=True)
SECRET_KEY = env.str("SECRET_KEY", default="only-for-development" if DEBUG else env.NOTSET)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=[])

if env.str("DATABASE_URL", default=""):
    DATABASES = {"default": env.db_url("DATABASE_URL")}
elif DEBUG:
    DATABASES = {
        "default": {
            "ENGINE": "testproject.embedded",
            "NAME": "postgres",
            "USER": "postgres",
            "DATA": Path(env.str("POSTGRES_DIR", default=str(BASE_DIR / ".postgres"))),
        }
    }
else:
    # Production must never get a hidden database.
    raise ImproperlyConfigured(
        "Set DATABASE_URL=postgresql://user:password@host:5432/name; "
        "only with DEBUG does the test project start a server of its own."
    )

if env.str("EMAIL_URL", default=""):
    globals().update(env.email_url("EMAIL_URL"))

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_mq",
    "testproject.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django_mq": {"handlers": ["console"], "level": "INFO"}},
}
