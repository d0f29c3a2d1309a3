"""Graph work on torch.fx: capture, lowering to canonical Programs, rewrites, fusion groups, swap.

The only room that reads users' graphs. It runs no candidate and times nothing. May import `core`,
`ir`, `device`, `runtime` and `kernels`. Read `capture`, `lower`, `fusion/partition`, `swap`.
"""
