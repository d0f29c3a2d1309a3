"""A search that attacks the judge: honest modules made wrong by kind, at random, and what gets in.

`subjects` are the modules, `faults` the ways of being wrong, `__main__` judges mutants and counts.
"""
