"""The cost of django_mq, compared with the bare driver: `python -m benchmarks`."""
