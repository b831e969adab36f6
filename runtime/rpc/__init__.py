"""The control plane: gRPC calls between tasks, their threads and their errors in words."""
