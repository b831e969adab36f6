"""Two towers: a vector for each person and for each film, whose product says how much the person likes the film.

The functions are pure JAX. Rows of tables come as arrays, whoever keeps the tables.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

DECAY = 0.01
"""The weight of the lengths of the vectors in the loss."""
Params = dict[str, jax.Array]


def init(dim: int) -> dict[str, np.ndarray]:
    """Returns the initial weights of both towers, which at first pass rows on as they are."""
    return {name: np.zeros((dim, dim), np.float32) for name in ("user", "film")}


def user_vectors(params: Params, users: jax.Array) -> jax.Array:
    """Returns the vectors of people, by their rows [N, dim]."""
    return users + jnp.tanh(users @ params["user"])


def film_vectors(params: Params, films: jax.Array, genres: jax.Array) -> jax.Array:
    """Returns the vectors of films, by their rows and the means of the rows of their genres, each [N, dim]."""
    # A film that few people know is placed by its genres.
    x = films + genres
    return x + jnp.tanh(x @ params["film"])


def loss_fn(params: Params, users: jax.Array, films: jax.Array, genres: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the liked film among all drawn films, in nats, and a penalty.

    Args:
        params: weights of the towers.
        users: rows [N, dim].
        films: rows [N + drawn, dim]: the film that each person likes, then films for all.
        genres: as ``films``.
    """
    wanting, found = user_vectors(params, users), film_vectors(params, films, genres)
    assert len(found) > len(wanting), "drawn films follow the liked ones"
    liked, drawn = found[: len(users)], found[len(users) :]
    # The drawn films are for all people of the batch: one product of matrices gives all scores.
    own = (wanting * liked).sum(-1, keepdims=True)
    logits = jnp.concatenate([own, wanting @ drawn.T], axis=1)
    # The liked film stands first.
    first = jnp.zeros(len(users), jnp.int32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, first).mean()
    return entropy + DECAY * ((wanting**2).sum(-1) + (liked**2).sum(-1)).mean()


def scores(params: Params, users: jax.Array, films: jax.Array, genres: jax.Array) -> jax.Array:
    """Returns the score of each film for each person, [users, films]."""
    return user_vectors(params, users) @ film_vectors(params, films, genres).T
