"""Errors of the model package."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be run: one line that names what, which value and how to fix it."""
