"""Ranks of `torch.distributed` that run the same graph run the same choice."""
