"""The systems that `benchmarks.step_rate` compares: each module is one process of one system."""
