"""Schedules: store what the code declares, broadcast what is due. No thread and no loop."""
