"""Device memory that the daemon fills: the kinds of it, and how it is laid out."""
