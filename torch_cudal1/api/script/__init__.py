"""Acceleration of a program that does not know this package: `hooks` stands between it and PyTorch while
`cudal1 run` runs it.
"""
