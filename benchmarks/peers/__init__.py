"""Sidegate beside what people would use instead, in one run.  `python -m benchmarks.peers` (`make bench-peers`)."""
