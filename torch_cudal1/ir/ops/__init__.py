"""Operators that a Program may call beside ATen's own: what PyTorch lacks, and what it hides inside
one composite operator.
"""
