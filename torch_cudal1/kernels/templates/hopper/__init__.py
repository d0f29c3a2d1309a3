"""Matrix products in CUDA C++ for Hopper's tensor cores (wgmma, sm_90a): of fp32 in pieces, and of
half types as they lie. `templates.gemm` proposes them.
"""
