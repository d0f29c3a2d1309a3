"""What the judge and a candidate's process say to each other: frames, tensors, Programs."""
