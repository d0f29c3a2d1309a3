"""The cache folder: entries, decision records, compiled kernels, quarantine; atomic files and
locks.
"""
