"""Sandboxes: real shells, isolated by the kernel, many at once."""
