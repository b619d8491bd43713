"""Measuring: workloads, throughput, and comparison with peers, each engine in a process of its own.

Timings live here and never in tests.
"""
