"""The doors: `accelerate`, the torch.compile backend, `plan`, `warmup`, `record`, `explain`,
agreement between ranks.

May import every room but `ingest` and `cli`. Read `accelerate` and `binding`, or `backend`.
"""
