"""Trains kernel writers: the CUDA-L1 pipeline (arXiv 2507.14111) with the judge as its only source
of reward.

Nothing of the package imports this folder, and importing it needs no package of the extra `train`:
what needs one says so when it is used. It runs no candidate itself; that is `judge`'s.
"""
