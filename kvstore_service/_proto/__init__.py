"""gRPC stubs, generated at build time from proto/."""
