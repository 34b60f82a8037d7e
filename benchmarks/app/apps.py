"""Start-up of the benchmarks' app."""

from django.apps import AppConfig
from django.conf import settings


class BenchConfig(AppConfig):
    """Starts the recording in a worker under measurement."""

    name = "benchmarks.app"
    label = "bench"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from benchmarks.app import recording

        if settings.BENCH_RECORDING:
            recording.begin(**settings.BENCH_RECORDING)
