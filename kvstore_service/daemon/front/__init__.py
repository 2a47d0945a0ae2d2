"""What peers reach: the broker, gRPC behind its gate, metrics."""
