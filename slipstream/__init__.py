"""Slipstream: training the drafters that make large language models decode several times faster."""

__version__ = "0.1.0"
