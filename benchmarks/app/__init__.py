"""The Django app of the benchmarks: tables for handlers to write to, and the handlers."""
