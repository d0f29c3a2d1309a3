"""Many sources judged at once for training and generation: slots, processes, a lock of the GPU, the
`train` profile.
"""
