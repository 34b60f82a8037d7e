"""Handlers for the acceptance tests: installed only in the workers that these start."""
