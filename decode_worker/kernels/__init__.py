"""What computes a decode step: sets of kernels, each chosen by name."""
