"""What RMM is to a resource, without a GPU."""
from . import mr
