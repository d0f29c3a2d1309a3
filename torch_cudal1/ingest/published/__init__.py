"""Kernels that others published as Python sources: judged as they are, lowered to data-only
Programs, judged again, stored.

`worker`, `trace` and `launches` run in the judge's child, `lower` and `adopt` here. No byte of a
published source is ever run in this process, and none of it is stored.
"""
