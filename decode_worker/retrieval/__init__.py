"""Indexes over stored keys: which records score highest for a query."""
