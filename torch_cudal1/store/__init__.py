"""Decisions on disk and elsewhere: the cache, what is trusted in it, the Hub, bundles and locks.

The only room with disk and network code for entries. May import `core`, `ir` and `device`: it runs
no candidate and says of none that it is right. Read `context`, then `cache/`.
"""
