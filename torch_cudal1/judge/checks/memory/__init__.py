"""Checks of memory that a candidate may not read, write or hand out."""
