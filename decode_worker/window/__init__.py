"""Device memory that the daemon fills: the kinds of it, and how it is laid out."""

from decode_worker.window import bounce, gdr, shm
from decode_worker.window.base import WINDOWS, Window

__all__ = ["WINDOWS", "Window", "bounce", "gdr", "shm"]
