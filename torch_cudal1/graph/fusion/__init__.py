"""Which steps of a Program one kernel may take together: fusion groups around products, attention,
rows and chains.
"""
