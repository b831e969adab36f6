"""The control plane: gRPC calls between tasks, with their threads and errors."""
