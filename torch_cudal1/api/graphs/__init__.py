"""The graphs that Dynamo hands to the backend: what is decided for each (`graph_decision`), by the
cache, by the evidence of its entries (`graph_evidence`) or by a measurement now (`quick_decision`),
and what runs (`traced_graph`).
"""
