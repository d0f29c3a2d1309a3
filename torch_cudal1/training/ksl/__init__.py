"""The kernel-schedule language: a closed vocabulary in which a small model can write kernels, and
what its sentences mean.

    tpl=row.two block=1024 warps=8 stages=1 mask=on acc=f32

is a *program*: a template and a value for each of its knobs, in their order. `codec` reads and
renders it; `grammar` says which programs there are; `ops` which references they may stand for. A
program says nothing of shapes: the task does.
"""
