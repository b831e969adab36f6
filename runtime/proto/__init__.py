"""Protocol messages, generated from protos/runtime/proto."""
