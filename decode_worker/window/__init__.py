"""Device memory that the daemon fills: how it is laid out."""
