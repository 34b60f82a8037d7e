"""Handlers of the fault suite: installed only in its own processes."""
