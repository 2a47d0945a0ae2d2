"""The per-node daemon that owns the DRAM and NVMe tiers, its typed client and its admin CLI."""

__version__ = "0.1.0"
