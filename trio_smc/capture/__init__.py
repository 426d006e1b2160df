"""Captures: recording the messages and RDMA writes of a stack as frames, and reading them."""
