"""Films that people like: MovieLens 100k, and the batches that each worker draws from it.

`python -m models.recommender.data [directory]` reads the data once and logs the result. Run before
the workers start, the command saves them the wait.

The data is by GroupLens: F. Maxwell Harper and Joseph A. Konstan, "The MovieLens Datasets: History
and Context", ACM Transactions on Interactive Intelligent Systems 5, 4 (2015). Its licence is for
research, asks for this citation, and forbids to pass the data on; so the files come from PyPI's
package RecBole, and are in no repository.
"""

import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import app, logging
from numpy.typing import NDArray

from harness import exit_codes

PACKAGE = "recbole==1.2.1"
WITHIN = "recbole/dataset_example/ml-100k"
"""Directory of the files in the package."""
SHA256: Mapping[str, str] = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
LIKED = 4.0
"""The least rating, of 1 to 5, of a film that somebody likes."""
TEST_SHARE = 0.2
"""The share of the likes that are kept for the test."""
_DOWNLOAD_SECS = 120.0

Ids = NDArray[np.int64]


class DataError(ValueError):
    """The error for data that cannot be used. The message names the file and the remedy."""


@dataclass(frozen=True, eq=False)
class Likes:
    """Pairs of a person and a film that the person likes.

    Attributes:
        users: [N], the people.
        films: [N], the films.
    """

    users: Ids
    films: Ids

    def __post_init__(self) -> None:
        assert len(self.users) == len(self.films)

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.users)

    def matrix(self, shape: tuple[int, int]) -> NDArray[np.bool_]:
        """Returns the pairs as bool [users, films]."""
        found = np.zeros(shape, bool)
        found[self.users, self.films] = True
        return found


@dataclass(frozen=True, eq=False)
class MovieLens:
    """The likes and the films.

    Attributes:
        train: likes to train on.
        test: likes to test on.
        shape: number of people, and of films.
        titles: titles of the films.
        genres: genres of all films behind each other.
        splits: film ``i`` has the genres from ``splits[i]`` to ``splits[i + 1]``.
        num_genres: number of genres.
    """

    train: Likes
    test: Likes
    shape: tuple[int, int]
    titles: Sequence[str]
    genres: Ids
    splits: Ids
    num_genres: int

    def __str__(self) -> str:
        """Returns one line for the log."""
        users, films = self.shape
        return (
            f"MovieLens 100k, {users} people, {films} films, {len(self.train)} likes to train on and "
            f"{len(self.test)} to test on"
        )

    def genres_of(self, films: Ids) -> tuple[Ids, Ids]:
        """Returns the genres of films behind each other, and the splits between the films."""
        # No loop over films: a batch has hundreds, and the worker's step waits for this.
        counts = np.diff(self.splits)[films]
        splits = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(splits[-1]) - np.repeat(splits[:-1] - self.splits[films], counts)
        return self.genres[places], splits

    def genre_shares(self) -> NDArray[np.float32]:
        """Returns the share of each genre in each film, [films, genres]."""
        shares = np.zeros((self.shape[1], self.num_genres), np.float32)
        counts = np.diff(self.splits)
        shares[np.repeat(np.arange(len(counts)), counts), self.genres] = 1
        # Some films have no genre.
        shares /= np.maximum(counts, 1)[:, None]
        return shares


class Batches:
    """An endless stream of random batches of a worker's share of the likes.

    Args:
        movies: the data.
        batch_size: likes in a batch.
        negatives: films in a batch that are drawn for all its people together.
        seed: seed of the stream.
        shard_index: number of the worker.
        num_shards: number of workers.
    """

    def __init__(
        self,
        movies: MovieLens,
        batch_size: int,
        negatives: int,
        seed: int = 0,
        shard_index: int = 0,
        num_shards: int = 1,
    ) -> None:
        self._users = movies.train.users[shard_index::num_shards]
        self._liked = movies.train.films[shard_index::num_shards]
        self._films = movies.shape[1]
        self._sizes = batch_size, negatives
        self._rng = np.random.default_rng((seed, shard_index))

    def next(self) -> tuple[Ids, Ids]:
        """Returns people [batch_size], and a film that each likes followed by drawn films."""
        size, negatives = self._sizes
        assert len(self._users), "each worker has a share of the likes"
        chosen = self._rng.integers(0, len(self._users), size)
        # One in 36 drawn films is one that the person likes, which costs less than to avoid them.
        drawn = self._rng.integers(0, self._films, negatives)
        return self._users[chosen], np.concatenate([self._liked[chosen], drawn])


def load(data_dir: str | None = None) -> MovieLens:
    """Reads MovieLens 100k from the cache, which is filled from PyPI once, or other data from `data_dir`.

    Args:
        data_dir: directory with files of the names of ``SHA256``, such as another data set of
            RecBole under these names. Never written to.

    Raises:
        DataError: A file is missing or damaged, or PyPI cannot be reached.
    """
    if data_dir:
        directory = Path(data_dir).expanduser()
        return _make_movies(*(_read(directory / name) for name in SHA256))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = cache / "bellwether" / "ml-100k"
    if not all((cache / name).exists() for name in SHA256):
        _download(cache)
    return _make_movies(*(_read(cache / name, digest) for name, digest in SHA256.items()))


def _read(path: Path, sha256: str = "") -> list[list[str]]:
    """Returns the rows of a file without its heading; with ``sha256`` the file must be the one of this digest.

    Raises:
        DataError: The file is missing, or is another one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{path} is damaged or another file: delete it")
    # Titles have quotation marks, which stand for themselves.
    lines = content.decode("utf-8").splitlines()
    return list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))


def _download(directory: Path) -> None:
    """Fills a directory with the files of the package.

    Raises:
        DataError: The package cannot be had, or the directory cannot be written.
    """
    logging.info("fetching MovieLens 100k: %s from PyPI, 2 MB, without what it needs", PACKAGE)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as made:
            command = [sys.executable, "-m", "pip", "download", *options, f"--dest={made}", PACKAGE]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECS
            )
            (wheel,) = Path(made).glob("*.whl")
            with zipfile.ZipFile(wheel) as package:
                for name in SHA256:
                    unpacked = package.extract(f"{WITHIN}/{name}", made)
                    # Another worker may do the same now, and both bring the same file.
                    os.replace(unpacked, directory / name)
    except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        # The last line of pip says why it failed.
        told = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise DataError(
            f"MovieLens 100k cannot be fetched from PyPI ({told[-1]}): give --data_dir, a directory "
            f"with {' and '.join(SHA256)} of the package {PACKAGE}"
        ) from error


def _make_movies(interactions: list[list[str]], items: list[list[str]]) -> MovieLens:
    ratings = np.array(interactions, float)
    # Ids count from 1 in the files.
    liked = ratings[ratings[:, 2] >= LIKED, :2].astype(np.int64) - 1
    users, films = (ratings[:, :2].max(axis=0)).astype(int).tolist()
    by_film = {int(number) - 1: (title, kinds.split()) for number, title, _, kinds in items}
    assert by_film.keys() >= {*range(films)}, "each film has a title"
    names = sorted({kind for _, kinds in by_film.values() for kind in kinds})
    found = [[names.index(kind) for kind in by_film[film][1]] for film in range(films)]
    # Each task draws the same split, whatever the flags of the run.
    is_test = np.random.default_rng(0).random(len(liked)) < TEST_SHARE
    return MovieLens(
        train=Likes(*liked[~is_test].T),
        test=Likes(*liked[is_test].T),
        shape=(users, films),
        titles=[by_film[film][0] for film in range(films)],
        genres=np.array([kind for kinds in found for kind in kinds], np.int64),
        splits=np.cumsum([0, *map(len, found)]),
        num_genres=len(names),
    )


def main(argv: Sequence[str]) -> None:
    """Reads the data once and logs the result, as the module's docstring says."""
    try:
        logging.info("data: %s", load(argv[1] if len(argv) > 1 else None))
    except DataError as error:
        exit_codes.leave(exit_codes.DATA, str(error))


if __name__ == "__main__":
    app.run(main)
