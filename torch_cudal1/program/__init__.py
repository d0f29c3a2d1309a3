"""Programs: kernels and rewrites as data, the check that lets one run, and the executors that run it.

This folder owns one danger: running machine code. It decides nothing about correctness or speed.
"""
