"""Device memory that the daemon fills: the kinds of it, and how it is laid out."""

from decode_worker.window import gdr as gdr
from decode_worker.window import shm as shm
