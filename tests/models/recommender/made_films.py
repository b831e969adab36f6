"""Films and likes that are made here, in RecBole's form, as MovieLens has them."""

import pathlib

import numpy as np

from models.recommender import data

KINDS, PEOPLE, FILMS, LIKES = 3, 60, 120, 20
"""People like films of their own kind only."""


def write_films(directory: pathlib.Path) -> None:
    """Writes the files into a directory."""
    rng = np.random.default_rng(0)
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(PEOPLE):
        own = np.arange(user % KINDS, FILMS, KINDS)
        rows += [
            f"{user + 1}\t{film + 1}\t{rating}\t0"
            for rating, films in ((5, rng.choice(own, LIKES, replace=False)), (1, [0, 1]))
            for film in films
        ]
    rows.append(f"{PEOPLE}\t{FILMS}\t2\t0")
    titles = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    titles += [f"{film + 1}\tFilm {film}\t1999\tKind{film % KINDS} New" for film in range(FILMS)]
    for name, lines in zip(data.SHA256, (rows, titles), strict=True):
        (directory / name).write_text("\n".join(lines) + "\n")
