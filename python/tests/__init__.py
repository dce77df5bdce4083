"""Tests of the package: `python3 -m unittest discover -s python -t python` in the root of the tree. They need no PyTorch."""
