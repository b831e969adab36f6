"""Host kernels that keep something: queues, accumulators, quorums."""
