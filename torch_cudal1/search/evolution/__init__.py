"""Evolutionary search over kernel configurations: mutants and crossovers of the fastest measured so
far.
"""
