"""Handlers for the acceptance tests: installed only in the workers that they start."""
