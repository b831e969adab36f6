"""Event files and what TensorBoard shows of them."""
