"""The Program, and the values about it that travel between the rooms: Region, Candidate, Verdict,
Timing, Entry.

A Program is a kernel, a rewrite or a whole model as plain data: ATen calls, launches of machine
code, nested Programs. This room says what one is, whether it may run at all, what it costs at
least, and what it means (the interpreter). It launches nothing and decides nothing. May import
`core`. Read `program`, `records`, `check`.
"""
