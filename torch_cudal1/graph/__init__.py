"""Graph work: capture with AOTAutograd, lowering to canonical Programs, partition into regions,
rewrite rules, swap.

The only folder that reads users' torch.fx graphs. It runs nothing of a candidate and times nothing.
"""
