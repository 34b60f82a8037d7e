"""Other queues on PostgreSQL, each in an environment of its own, measured in the same run."""
