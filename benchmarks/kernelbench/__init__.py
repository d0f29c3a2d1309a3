"""KernelBench, the project's headline: every task against the best of what PyTorch itself offers,
none ever dropped.

`python -m benchmarks.kernelbench run TASKS --out FILE.jsonl` measures; `... report FILE.jsonl`
makes tables and a page. benchmarks/README.md has the protocol. TASKS names a checkout, a release
file or a data set of the Hub; none is part of this repository.

Read `task_pool` (many tasks, one process each) first, then `child` (one task from its text to its
row), `measuring` and `statistics`.
"""
