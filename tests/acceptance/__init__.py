"""Workers as users run them: `manage.py mq_worker` as processes that get signals, die or freeze."""
