"""Benchmarks: each operator's figures beside its baselines, all measured in one run. ``longmoe bench NAME``.

Glossary: *round* - every contestant once, in turn, so that a drift of the machine's speed meets all alike; *ratio* - a
contestant's time over the baseline's in the same round, as the median over the rounds.
"""
