"""Results as Markdown, subject by subject: each module knows the keys of its results files.

`benchmarks.tables` puts the tables on their pages. Nothing here measures or decides.
"""
