"""Warm-up with many workers: the same tasks on every GPU of a machine, on its CPU, or on a Ray
cluster.
"""
