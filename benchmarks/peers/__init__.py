"""Other queues on PostgreSQL, each in its own environment, measured in the same run."""
