"""Benchmarks: one question per module, `python -m bench.NAME [--json]`."""
