"""Confines a process, by plain system calls, before it runs a candidate.

A small launcher imports these modules, so they import nothing but each other and the standard
library: no torch. They do not decide which confinement a child needs, nor check that it holds; the
judge does (`judge.sandbox.start`, `judge.sandbox.probe`).
"""
