"""Fewer bits by choice: a module with weights of 8 or 4 bits, or products in e4m3, whose outputs are
compared with those of the module that it was made of.
"""
