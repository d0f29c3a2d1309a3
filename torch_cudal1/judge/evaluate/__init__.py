"""The judge's front doors and its decisions: evaluate a Program or a source, time the baselines,
accept or reject.
"""
