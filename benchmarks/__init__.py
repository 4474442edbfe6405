"""What Sidegate costs, measured against what it stands on.  `python -m benchmarks` prints the table."""
