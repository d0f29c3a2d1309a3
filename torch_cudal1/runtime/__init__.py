"""Runs Programs in the user's process: executors, schedules, CUDA graphs, and the guard in front of
a bound call.

May import `core`, `ir` and `device`. It owns one danger, running machine code that was checked
before; whether that is right and fast was decided elsewhere. Read `executor`, `schedule`, `guard`.
"""
