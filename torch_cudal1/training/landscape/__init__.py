"""Measures a closed set of programs once and for all, so that training can be repeated on any
machine with measured rewards.

`survey` goes through all programs of all tasks, `naive_pool` says what a trusting evaluator would
have believed, `landscape_file` is the file that is published; `training.replay` answers from it. Its
numbers are of the machine that it names and are called *replay*.
"""
