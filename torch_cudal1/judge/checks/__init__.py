"""The checks that a candidate must pass, one file a family; `registry` lists them in order.

A check takes a `Trial` and returns its results. It measures and compares; which profile runs it is
in its `CheckSpec`, what follows from a failure is decided in `judge.evaluate`. Read `spec`, then
`registry`, then `numerics` as the pattern of a check.
"""
