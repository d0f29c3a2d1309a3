"""Plans written before their first run, cells run side by side, and what may be said of the
results.
"""
