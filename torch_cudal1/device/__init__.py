"""What a device is and what it can do: which GPU this is, its limits and peaks, its driver, its
locks and its state.

May import `core` and `ir`. Everything that speaks to the CUDA driver or to NVRTC is in `cuda/`.
Read `target`, then `cuda/driver`.
"""
