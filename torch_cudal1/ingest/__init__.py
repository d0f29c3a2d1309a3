"""Kernels by others: published formats and language models. Judged as sources, lowered to Programs,
judged again, stored.

May import every room but `api` and `cli`. No byte of a source by others runs in this process, and
none of it is stored. Read `published/adopt`.
"""
