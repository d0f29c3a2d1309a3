"""What is tried for a region, and in which order: rewrites, kernels, schedules, a budget, a cost
model.

`tune` is the whole flow on one page. May import the rooms before it; it asks `judge` about every
candidate and never says of one that it is right. Read `tune`, `strategy`, `group_kernels`.
"""
