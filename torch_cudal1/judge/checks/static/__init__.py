"""Checks that read a candidate and run nothing: its Program, its machine code, its source text."""
