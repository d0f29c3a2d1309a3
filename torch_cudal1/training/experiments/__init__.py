"""Experiments: a plan that is written before its first run, arms and seeds that run side by side,
and the comparison of their results.
"""
