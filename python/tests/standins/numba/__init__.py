"""What numba-cuda is to a memory manager, without a GPU."""
