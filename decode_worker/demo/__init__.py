"""`headgate demo`: what the store is for, shown on this machine."""
