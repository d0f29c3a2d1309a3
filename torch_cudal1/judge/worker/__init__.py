"""What runs inside a candidate's process. It holds no reference, no tolerance and no verdict."""
