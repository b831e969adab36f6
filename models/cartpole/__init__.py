"""CartPole with asynchronous actor-critic workers that share their parameters."""
