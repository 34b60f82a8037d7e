"""The worker as people run it: `manage.py mq_worker` as processes that are told, killed, frozen."""
