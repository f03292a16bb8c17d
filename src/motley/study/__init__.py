"""Arms x seeds, statistics, report."""
