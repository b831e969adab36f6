"""CartPole, learned by asynchronous actor-critic workers (A3C, Mnih et al. 2016): every process runs this program.

python -m harness.launch --ps=1 --workers=2 -- python -m models.cartpole.trainer

Each worker plays games of its own. It reads the parameters from the ps, plays with them for a
while, and pushes the gradient of these moves. No worker waits for another.
"""

import argparse
from collections import deque

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import harness
import runtime as rt

parser = argparse.ArgumentParser()
parser.add_argument("--logdir", help="Directory of checkpoints and TensorBoard events.")
parser.add_argument(
    "--train_steps", type=int, default=3000, help="Updates of all workers together, at the most."
)
parser.add_argument("--games", type=int, default=16, help="Games that a worker plays at once.")

TIME = 32
"""Moves in each game between two updates."""
DISCOUNT = 0.99
SOLVED = 475.0
"""The mean score of 100 games from which on CartPole-v1 counts as solved (its registration in Gymnasium)."""
GAE = 0.95
"""Lambda of generalised advantage estimation (Schulman et al. 2016)."""
Params = dict[str, jax.Array]


def init_params() -> dict[str, np.ndarray]:
    """Returns initial parameters: two hidden layers of 64 for the policy, and two for the value."""
    rng = np.random.default_rng(1)
    layers = {
        "p1": (4, 64),
        "p2": (64, 64),
        "p3": (64, 2),
        "v1": (4, 64),
        "v2": (64, 64),
        "v3": (64, 1),
    }
    # Small at first, so that both moves are about as likely.
    scale = {"p3": 0.01}
    return {
        name: (rng.normal(size=shape) * scale.get(name, 1.0) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in layers.items()
    } | {f"{name}_bias": np.zeros(shape[1], np.float32) for name, shape in layers.items()}


def network(params: Params, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits [..., 2] of the moves and values [...] of observations float32 [..., 4]."""

    def layers(x: jax.Array, first: str, second: str, last: str) -> jax.Array:
        for name in (first, second):
            x = jnp.tanh(x @ params[name] + params[f"{name}_bias"])
        return x @ params[last] + params[f"{last}_bias"]

    return layers(seen, "p1", "p2", "p3"), layers(seen, "v1", "v2", "v3")[..., 0]


def loss_fn(
    params: Params, seen: jax.Array, moves: jax.Array, advantages: jax.Array, returns: jax.Array
) -> jax.Array:
    """Returns the actor-critic loss of ``seen`` [N, 4], ``moves``, ``advantages`` and ``returns`` [N]."""
    logits, values = network(params, seen)
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, moves[:, None], 1)[:, 0]
    # The entropy keeps the policy from a decision that comes too early.
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return (-chosen * advantages + (values - returns) ** 2 - 0.01 * entropy).mean()


class Player:
    """A player of several games at once, who records observations and moves.

    Args:
        games: number of games at once.
        seed: of the games and the moves.
    """

    def __init__(self, games: int, seed: int) -> None:
        self.env = gymnasium.make_vec(
            "CartPole-v1", num_envs=games, vectorization_mode="vector_entry_point"
        )
        self.finished: deque[float] = deque(maxlen=100)
        """Scores of the last games."""
        self._rng = np.random.default_rng(seed)
        self._seen, _ = self.env.reset(seed=seed)
        self._scores = np.zeros(games)
        self.over = np.zeros(games, bool)
        """True for games that ended with the last move."""
        self._network = jax.jit(network)

    def play(self, params: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Plays ``TIME`` moves in each game; returns the arguments of ``loss_fn`` after the parameters."""
        seen, moves, rewards, values, over, lost, kept = [], [], [], [], [], [], []
        for _ in range(TIME):
            logits, value = (np.asarray(x) for x in self._network(params, self._seen))
            move = (
                self._rng.random(len(logits)) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
            ).astype(np.int32)
            seen.append(self._seen)
            moves.append(move)
            values.append(value)
            # The step after the end of a game only resets the game, so its move does not count.
            kept.append(~self.over)
            self._seen, reward, fell, cut, _ = self.env.step(move)
            self._scores = np.where(self.over, 0, self._scores + reward)
            # A game that lasted 500 moves is cut. Only a fallen pole counts as lost.
            self.over = fell | cut
            self.finished.extend(self._scores[self.over])
            # The factor keeps values between 0 and 1.
            rewards.append(reward * (1 - DISCOUNT))
            over.append(self.over)
            lost.append(fell)
        value = np.asarray(self._network(params, self._seen)[1])
        advantage = np.zeros(len(self.over))
        advantages = []
        for t in reversed(range(TIME)):
            error = rewards[t] + DISCOUNT * value * ~lost[t] - values[t]
            advantage = error + DISCOUNT * GAE * advantage * ~over[t]
            advantages.append(advantage)
            value = values[t]
        keep = np.concatenate(kept)
        good = np.concatenate(advantages[::-1])
        returns = good + np.concatenate(values)
        good = (good - good[keep].mean()) / (good[keep].std() + 1e-6) * keep
        return (
            np.concatenate(seen),
            np.concatenate(moves),
            good.astype(np.float32),
            np.where(keep, returns, np.concatenate(values)).astype(np.float32),
        )


def score(params: dict[str, np.ndarray], games: int = 100) -> float:
    """Returns the mean score of the likelier moves over ``games`` games; 500 is the most."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=games, vectorization_mode="vector_entry_point")
    # Other games than those of training.
    seen, _ = env.reset(seed=2)
    scores, over = np.zeros(games), np.zeros(games, bool)
    while not over.all():
        logits, _ = jax.jit(network)(params, seen)
        seen, reward, lost, cut, _ = env.step(np.asarray(logits).argmax(-1))
        scores += reward * ~over
        over |= lost | cut
    return float(scores.mean())


def main(options: argparse.Namespace, others: list[str]) -> None:
    """Holds the parameters as a ps, or plays and learns as a worker."""
    with harness.join_cluster(others) as me:
        with me.device():
            global_step = harness.get_or_create_global_step()
            params = rt.variables(init_params(), name="network")
            seen = rt.placeholder(jnp.float32, [None, 4], name="seen")
            moves = rt.placeholder(jnp.int32, [None], name="moves")
            advantages = rt.placeholder(jnp.float32, [None], name="advantages")
            returns = rt.placeholder(jnp.float32, [None], name="returns")
            loss = rt.call(loss_fn, params, seen, moves, advantages, returns)
            # At a constant rate, the policy may get worse again after it was good.
            rate = optax.linear_schedule(2e-3, 0.0, options.train_steps)
            learn = harness.Optimizer(optax.adam(rate)).minimize(loss, global_step=global_step)

            lasted = rt.placeholder(jnp.float32, [], name="lasted")
            curve = harness.summary.scalar("score", lasted)

        player = Player(options.games, seed=me.number)
        supervisor = harness.Supervisor(
            is_chief=me.is_chief, logdir=options.logdir, global_step=global_step, summary_op=None
        )
        with supervisor.managed_session(me.target) as session:
            step, told, reached = 0, 0, 0.0
            while not supervisor.should_stop() and step < options.train_steps:
                # One copy for all moves of a batch, whatever other workers push meanwhile.
                batch = player.play(session.run(params))
                _, step = session.run(
                    [learn, global_step],
                    dict(zip((seen, moves, advantages, returns), batch, strict=True)),
                )
                if me.is_chief and player.finished and step >= told + 50:
                    told, mean = step, float(np.mean(player.finished))
                    print(
                        f"step {step}: the last {len(player.finished)} games lasted {mean:.0f} "
                        "moves",
                        flush=True,
                    )
                    if options.logdir:
                        supervisor.summary_computed(
                            session, session.run(curve, {lasted: mean}), int(step)
                        )
                    if mean >= SOLVED and (reached := score(session.run(params))) >= SOLVED:
                        supervisor.request_stop(everybody=True)
            if me.is_chief:
                reached = reached if reached >= SOLVED else score(session.run(params))
                print(f"Mean-Score: {reached:.1f}", flush=True)


if __name__ == "__main__":
    # ``join_cluster`` reads the flags that this parser does not know.
    main(*parser.parse_known_args())
