"""Benchmarks: one file per measured claim, one JSON line each."""
