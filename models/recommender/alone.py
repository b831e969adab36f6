"""The same training in one process of plain JAX, with whole tables in its memory: the measure for the cluster."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import harness
from models.recommender import model
from models.recommender.data import Batches, MovieLens

Arrays = dict[str, jax.Array]
Params = dict[str, Arrays]


def train(
    movies: MovieLens, batches: Batches, steps: int, dim: int, rates: tuple[float, float]
) -> NDArray:
    """Trains without parameter servers, and returns the scores of all films for all people.

    Args:
        movies: the data.
        batches: batches of the whole data.
        steps: number of batches.
        dim: length of a row.
        rates: rates of the towers and of the tables.
    """
    # The shares of genres in a film stand for the bags of the cluster's program.
    shares = jnp.asarray(movies.genre_shares())
    rules = {"towers": optax.adam(rates[0]), "tables": harness.rowwise_adagrad(rates[1])}
    rule = optax.multi_transform(rules, {name: name for name in rules})
    towers = {name: jnp.asarray(value) for name, value in model.init(dim).items()}
    params = {"towers": towers, "tables": _init_tables(movies, dim)}

    def loss_fn(params: Params, users: jax.Array, films: jax.Array) -> jax.Array:
        return model.loss_fn(params["towers"], *_find_rows(params["tables"], shares, users, films))

    @jax.jit
    def update(
        params: Params, state: optax.OptState, users: jax.Array, films: jax.Array
    ) -> tuple[Params, optax.OptState]:
        changes, state = rule.update(jax.grad(loss_fn)(params, users, films), state, params)
        return optax.apply_updates(params, changes), state

    state = rule.init(params)
    for _ in range(steps):
        params, state = update(params, state, *batches.next())
    # Each person and each film has a row, and the scores are those of all pairs.
    everything = _find_rows(params["tables"], shares, *map(jnp.arange, movies.shape))
    return np.asarray(model.scores(params["towers"], *everything))


def _find_rows(
    tables: Arrays, shares: jax.Array, users: jax.Array, films: jax.Array
) -> tuple[jax.Array, ...]:
    return tables["users"][users], tables["films"][films], shares[films] @ tables["genres"]


def _init_tables(movies: MovieLens, dim: int) -> Arrays:
    """Returns first rows as ``rt.Table`` makes them, by another seed."""
    sizes = {"users": movies.shape[0], "films": movies.shape[1], "genres": movies.num_genres}
    draw = jax.nn.initializers.truncated_normal(dim**-0.5)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return {
        name: draw(key, (rows, dim)) for key, (name, rows) in zip(keys, sizes.items(), strict=True)
    }
