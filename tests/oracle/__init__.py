"""An independent NumPy implementation of docs/qsac.md, for comparing decisions and tokens.

`qsac.Oracle` decodes a checkpoint; `replay.Replay` decides on hand-written keys and queries.
Nothing here imports anything but NumPy and the standard library.
"""
