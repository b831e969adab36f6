"""Programs as data: a stage's jaxpr becomes a list of equations, and a task makes a function of jax.lax of it again."""
