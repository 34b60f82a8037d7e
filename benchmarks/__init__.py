"""What django_mq costs, measured beside the bare driver: `python -m benchmarks`."""
