"""What RMM is to those who bring a resource, without a GPU."""
from . import mr
