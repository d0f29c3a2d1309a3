"""Entries in Hub repositories: pinned commits, read-through mirror, push and pull."""
