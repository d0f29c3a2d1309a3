"""Measures a closed set of programs once, so that training can be repeated on any machine with
measured rewards.

`survey` measures all programs of all tasks, `naive_pool` measures what a naive evaluator would
report, `landscape_file` reads and writes the published file, and `training.replay` answers from it.
Its numbers are of the machine that it names, and are called *replay*.
"""
