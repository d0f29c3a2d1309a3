"""What earlier timings tell of the next ones: records, a cost model, the order of proposals and their next generation.

It guesses, so it only says what to measure first. Nothing here runs a candidate, calls one right, or decides what runs.
"""
