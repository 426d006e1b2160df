"""RoCE adapters and the kernel's soft-RoCE, through pyverbs."""
