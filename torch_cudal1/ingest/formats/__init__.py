"""Published kernels as tasks: CUDA-L1 release files, FlashInfer-Trace folders, KernelBench-style
files.
"""
