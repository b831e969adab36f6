"""Quality of recommendations: recall and AUC on likes that no training has seen, and a baseline."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.recommender.data import MovieLens

SHOWN = 10
"""Films that are recommended to each person."""


class Quality(NamedTuple):
    """The quality of recommendations, as means over people with likes in the test.

    Attributes:
        recall: share of a person's likes that are among the recommended films.
        auc: share of the pairs of a like and another film in which the like has the higher score.
    """

    recall: float
    auc: float

    def __str__(self) -> str:
        """Returns both numbers."""
        return f"recall@{SHOWN} {self.recall:.4f}  AUC {self.auc:.4f}"


def measure(movies: MovieLens, scores: NDArray) -> Quality:
    """Returns the quality of scores [users, films]. Films of the training are recommended to nobody again.

    Examples:
        >>> from models.recommender.data import Likes, MovieLens
        >>> none = np.zeros(0, np.int64)
        >>> likes = [Likes(np.array([0]), np.array([film])) for film in (0, 1)]
        >>> movies = MovieLens(*likes, (1, 4), list("abcd"), none, none, 0)
        >>> print(measure(movies, np.array([[9.0, 5.0, 1.0, 7.0]])))
        recall@10 1.0000  AUC 0.5000
    """
    known, wanted = movies.train.matrix(movies.shape), movies.test.matrix(movies.shape)
    # A like of the training may be one of the test, too, if somebody has rated a film twice.
    wanted &= ~known
    assert scores.shape == movies.shape, "each person has a score for each film"
    # A person without a like in the test says nothing about the scores.
    recalls, aucs = [], []
    for user in np.flatnonzero(wanted.any(axis=1)):
        free = np.flatnonzero(~known[user])
        order = np.argsort(scores[user, free], kind="stable")
        # In the order of the scores, the highest last.
        is_wanted = wanted[user, free[order]]
        count, others = is_wanted.sum(), len(free) - is_wanted.sum()
        recalls.append(is_wanted[-SHOWN:].sum() / count)
        # For each like the number of other films with lower scores.
        below = np.flatnonzero(is_wanted) - np.arange(count)
        aucs.append(below.mean() / others)
    return Quality(float(np.mean(recalls)), float(np.mean(aucs)))


def popularity(movies: MovieLens) -> NDArray[np.int64]:
    """Returns as scores the number of people who like a film, the same for everybody."""
    counts = np.bincount(movies.train.films, minlength=movies.shape[1])
    return np.broadcast_to(counts, movies.shape)


def nearest(vectors: NDArray, film: int, count: int = 4) -> list[int]:
    """Returns the films whose vectors have the smallest angles to a film's, the nearest first."""
    # Popular films have long vectors, so a product alone would put them near every film.
    lengths = np.linalg.norm(vectors, axis=1)
    cosines = vectors @ vectors[film] / (lengths * lengths[film])
    return [int(i) for i in np.argsort(-cosines) if i != film][:count]
