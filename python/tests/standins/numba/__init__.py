"""What numba-cuda is to those who manage its memory, without a GPU."""
