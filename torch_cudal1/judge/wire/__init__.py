"""What the judge and a candidate's process exchange: frames, tensors, Programs."""
