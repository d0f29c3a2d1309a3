"""Evaluates many sources side by side, for training and generation: slots, their processes, a GPU
lock, the `train` profile.
"""
