"""Trains kernel writers: the CUDA-L1 pipeline (arXiv 2507.14111) with the judge as its only reward.

May import every room, and no room imports it: the command line finds `cudal1 train` by an entry point.
Importing it needs no package of the extra `train`; what needs one says so when it is used. It runs no
candidate itself, the judge does. Read `contrastive`, `grpo`, `runs`.
"""
