"""A checkpoint is measured once; the profile that comes of it says when heads may reuse what they selected."""
