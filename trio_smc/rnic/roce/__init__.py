"""RoCE adapters and soft-RoCE by pyverbs."""
