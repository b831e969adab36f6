"""The tensor channel: steady-state calls between tasks, framed raw tensors over TCP or a Unix socket."""
