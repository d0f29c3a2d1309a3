"""What a process does to itself, with plain system calls, before it runs code that nobody vouches
for.

Imported by a small launcher, so nothing here imports torch, or anything but the standard library.
It confines; which confinement a child needs, and whether it came out as asked, is the judge's
business.
"""
