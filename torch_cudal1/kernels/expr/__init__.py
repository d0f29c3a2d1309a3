"""Tensor expressions: what a fusion group's ATen steps compute, with views and broadcasts as affine
index maps.
"""
