"""Timings of every op beside the ways to compute the same without fastrl; see README.md."""
