"""Schedules: store those that the code declares, broadcast those that are due. Starts no thread."""
