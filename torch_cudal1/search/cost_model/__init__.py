"""What earlier timings tell of the next ones: records on disk, a random forest, whether it is to be
believed.

It guesses, so it only says what to measure first. Nothing here runs a candidate, calls one right,
or decides what runs.
"""
