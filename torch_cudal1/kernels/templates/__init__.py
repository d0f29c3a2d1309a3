"""Kernels that are more than a loop nest: matrix products, convolutions, attention, recurrent
layers.
"""
