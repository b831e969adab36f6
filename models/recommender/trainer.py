r"""Recommendations of films by two towers with tables on the ps: every process of the cluster runs this program.

    # a cluster on this machine
    python -m harness.launch --ps=1 --workers=2 -- python -m models.recommender.trainer
    # one process, no cluster
    python -m models.recommender.trainer

The rows of people, films and genres lie in tables on the ps, and a worker moves the rows of its
batch alone. At the end the chief prints how good the recommendations are, beside one process of
plain JAX and the most popular films. An evaluator follows the checkpoints.
"""

import time
from dataclasses import dataclass

import numpy as np
import optax
from absl import app, flags, logging
from numpy.typing import NDArray

import harness
import runtime as rt
from harness import exit_codes
from models.recommender import alone, data, metrics, model

FLAGS = flags.FLAGS
flags.DEFINE_string("logdir", None, "Directory of checkpoints and TensorBoard events.")
flags.DEFINE_string("data_dir", None, "Directory of MovieLens; without it PyPI has the data.")
flags.DEFINE_integer("train_steps", 2000, "Steps of all workers together.", lower_bound=1)
flags.DEFINE_integer("batch_size", 256, "Likes in a batch.", lower_bound=1)
flags.DEFINE_integer("negatives", 128, "Films in a batch that are drawn.", lower_bound=1)
flags.DEFINE_integer("dim", 32, "Length of a row.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.001, "Adam's rate for the towers.")
flags.DEFINE_float("table_rate", 0.1, "Rate of row-wise Adagrad for the tables.")
flags.DEFINE_float("save_model_secs", 5.0, "Seconds between two checkpoints.")
flags.DEFINE_integer("log_every_steps", 500, "Steps between two lines of progress.", lower_bound=1)
flags.DEFINE_bool(
    "compare", True, "Train in one process of plain JAX, too, and tell how good it is."
)

SHOWN = ("Star Wars", "Toy Story", "Fargo")
"""The films whose nearest films are printed."""


@dataclass(frozen=True)
class TrainingGraph:
    """The tensors and operations that the training loop uses."""

    users: rt.Tensor
    films: rt.Tensor
    genres: rt.Tensor
    splits: rt.Tensor
    loss: rt.Tensor
    scores: rt.Tensor
    vectors: rt.Tensor
    train_op: rt.Operation
    global_step: rt.Variable


def main(argv: list[str]) -> None:
    """Serves tables as a ps, trains as a worker, or evaluates."""
    # The first argument is the program's name, and the others are flags of a task.
    with harness.join_cluster(argv[1:]) as me:  # a ps stays here until training is over
        try:
            movies = data.load(FLAGS.data_dir)
        except data.DataError as error:
            exit_codes.leave(exit_codes.DATA, f"{me.job} {me.index}: {error}")
        if me.index == 0:
            logging.info("data: %s", movies)
        graph = build_graph(me, movies)
        if me.job == "evaluator":
            evaluate_checkpoints(me, graph, movies)
        else:
            train(me, graph, movies)


def build_graph(me: harness.Member, movies: data.MovieLens) -> TrainingGraph:
    """Builds the graph, the same on every worker: tables on the ps, computation on this worker."""
    with me.device():
        global_step = harness.get_or_create_global_step()
        params = rt.variables(model.init(FLAGS.dim), name="towers")
        users = rt.Table("users", rows=movies.shape[0], dim=FLAGS.dim)
        films = rt.Table("films", rows=movies.shape[1], dim=FLAGS.dim)
        genres = rt.Table("genres", rows=movies.num_genres, dim=FLAGS.dim)
        # Ids are values of the host, and XLA never sees them.
        user_ids, film_ids, genre_ids, splits = (
            rt.placeholder(np.int64, [None], name=name)
            for name in ("user_ids", "film_ids", "genre_ids", "genre_splits")
        )
        kinds = genres.bag(genre_ids, splits, combiner="mean")
        loss = rt.call(model.loss_fn, params, users.lookup(user_ids), films.lookup(film_ids), kinds)
        optimizer = harness.Optimizer(
            optax.adam(FLAGS.learning_rate), tables=harness.rowwise_adagrad(FLAGS.table_rate)
        )
        train_op = optimizer.minimize(loss, global_step=global_step)
        scores, vectors = score_films(params, users, films, genres, movies)
    return TrainingGraph(
        user_ids, film_ids, genre_ids, splits, loss, scores, vectors, train_op, global_step
    )


def score_films(
    params: dict[str, rt.Variable],
    users: rt.Table,
    films: rt.Table,
    genres: rt.Table,
    movies: data.MovieLens,
) -> tuple[rt.Tensor, rt.Tensor]:
    """Returns the scores of all films for all people, and the vectors of all films."""
    every_film = (
        films.read(np.arange(films.rows)),
        genres.bag(movies.genres, movies.splits, combiner="mean"),
    )
    scores = rt.call(model.scores, params, users.read(np.arange(users.rows)), *every_film)
    return scores, rt.call(model.film_vectors, params, *every_film)


def evaluate_checkpoints(me: harness.Member, graph: TrainingGraph, movies: data.MovieLens) -> None:
    """Evaluates the checkpoints of the chief on the test set, until training is over."""

    def evaluate(session: rt.Session, step: int) -> dict[str, float]:
        return metrics.measure(movies, session.run(graph.scores))._asdict()

    harness.Evaluator(evaluate, FLAGS.logdir, master=me.target, best_by="recall").run()


def train(me: harness.Member, graph: TrainingGraph, movies: data.MovieLens) -> None:
    """Trains until the global step has reached the end, then (on the chief) tests."""
    batches = data.Batches(
        movies,
        FLAGS.batch_size,
        FLAGS.negatives,
        seed=1,
        shard_index=me.number,
        num_shards=me.workers,
    )
    supervisor = harness.Supervisor(
        is_chief=me.is_chief,
        logdir=FLAGS.logdir,
        global_step=graph.global_step,
        save_model_secs=FLAGS.save_model_secs,
    )
    progress = harness.Progress(FLAGS.train_steps, every=FLAGS.log_every_steps)
    # The lines of Progress tell the same as those of the session.
    options = rt.SessionConfig(log_secs=0)
    with supervisor.managed_session(me.target, config=options) as session:
        step, began = int(session.run(graph.global_step)), time.monotonic()
        while not supervisor.should_stop() and step < FLAGS.train_steps:
            users, films = batches.next()
            genres, splits = movies.genres_of(films)
            feeds = {
                graph.users: users,
                graph.films: films,
                graph.genres: genres,
                graph.splits: splits,
            }
            _, loss, count = session.run([graph.train_op, graph.loss, graph.global_step], feeds)
            step = int(count)
            progress.update(step, cost=float(loss))
        # The last reads need the ps, so they come before the end of the session.
        if me.is_chief:
            scores, vectors = session.run([graph.scores, graph.vectors])
            took = time.monotonic() - began
    progress.close()
    if me.is_chief:
        report(movies, scores, vectors, f"{me.workers} workers and their ps, {took:.0f} s")


def report(movies: data.MovieLens, scores: NDArray, vectors: NDArray, name: str) -> None:
    """Prints how good the recommendations are, beside others, and the nearest films of some."""
    results = {name: metrics.measure(movies, scores)}
    if FLAGS.compare:
        batches = data.Batches(movies, FLAGS.batch_size, FLAGS.negatives, seed=1)
        rates = FLAGS.learning_rate, FLAGS.table_rate
        plain = alone.train(movies, batches, FLAGS.train_steps, FLAGS.dim, rates)
        results["one process, plain JAX"] = metrics.measure(movies, plain)
    results["the most popular films"] = metrics.measure(movies, metrics.popularity(movies))
    for who, quality in results.items():
        print(f"{who:<32}  {quality}", flush=True)
    for title in SHOWN:
        # Other data has other titles.
        if title in movies.titles:
            near = metrics.nearest(vectors, movies.titles.index(title))
            print(f"near {title}: {'; '.join(movies.titles[film] for film in near)}", flush=True)


def parse_flags(argv: list[str]) -> list[str]:
    """Reads the flags of this program, and returns the others, which ``join_cluster`` reads."""
    rest: list[str] = FLAGS(argv, known_only=True)
    return rest


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
