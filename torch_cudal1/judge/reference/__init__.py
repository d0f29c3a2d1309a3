"""What a candidate is compared with: secret inputs, eager and float64 results, error statistics.
Never in a candidate's process.
"""
