"""Searches candidates for a region: rewrites, kernels and schedules, within a budget, ordered by a
cost model.

`tune` is the whole flow on one page. Imports from every room except `ingest`, `api`, `cli` and
`training`. `judge` decides whether a candidate is correct. Read `tune`, `strategy`,
`group_kernels`.
"""
