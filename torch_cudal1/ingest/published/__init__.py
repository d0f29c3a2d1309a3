"""Kernels that others published as Python sources: judged as they are, lowered to data-only
Programs, judged again, stored.

`source_worker`, `trace_source`, `launches` and `tidy` run in the judge's child, `lower_source` and
`adopt` in the parent. No byte of a published source runs in the parent, and none of it is stored.
"""
