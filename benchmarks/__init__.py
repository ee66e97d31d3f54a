"""Measurements: each script writes `benchmarks/results/<name>.json`, ratios against named baselines in one run."""
