"""Hints for wrong names: the names of other libraries, and the names here."""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

# Fields of configs, and their names in other libraries.
_FIELDS = {
    "num_updates": ("num_iterations", "n_updates"),
    "num_steps": (
        *("n_steps", "train_freq", "train_frequency", "rollout_length"),
        "unroll_length",
    ),
    "num_epochs": ("n_epochs", "epochs", "update_epochs", "num_sgd_iter"),
    "num_minibatches": ("n_minibatches", "nminibatches"),
    "learning_rate": ("lr",),
    "gamma": ("discount", "discounting"),
    "gae_lambda": ("lam", "lambda_", "gae_lam"),
    "lambda_": ("lam", "q_lambda", "gae_lambda"),
    "clip_eps": ("clip_range", "clip_coef", "clip_param", "clip_epsilon", "clip"),
    "clip_range_vf": ("vf_clip_param", "clip_value"),
    "vf_coef": ("value_coef", "value_loss_coef", "vf_loss_coeff", "vf_coeff"),
    "ent_coef": ("entropy_coef", "entropy_coeff", "entropy_cost", "ent_coeff"),
    "max_grad_norm": ("max_gradient_norm", "grad_clip", "grad_norm"),
    "desired_kl": ("kl_target",),
    "tau": ("polyak", "target_tau"),
    "buffer_size": ("memory_size", "replay_size", "max_replay_size"),
    "learning_starts": ("start_steps", "min_replay_size"),
    "target_update_interval": ("target_network_frequency", "target_update_freq"),
    "exploration_final_eps": ("end_e", "eps_end", "epsilon_end"),
    "hidden_layer_sizes": ("net_arch", "hidden_sizes", "policy_kwargs"),
    "normalize_observations": ("normalize_obs", "norm_obs"),
    # Options of the command.
    "folder": (
        *("exp_name", "run_name", "log_dir", "logdir"),
        *("out", "output", "output_dir", "save_dir"),
    ),
}
_TOTAL = "each update takes `num_steps * num_envs` environment steps"
_BATCH = "an update has `num_steps * num_envs` rows"
# Names of numbers that follow from a field here, and how they follow.
_COMPUTED = {
    "num_updates": (
        _TOTAL,
        ("total_timesteps", "num_timesteps", "total_steps", "total_env_steps"),
    ),
    "num_minibatches": (_BATCH, ("batch_size", "minibatch_size", "mini_batch_size")),
}
# Names that are arguments of functions here, not fields of a config.
ARGUMENTS = {
    "rollout.envs.make_vec(id, num_envs=...)": ("num_envs", "n_envs", "num_actors"),
    "rollout.envs.make_vec(id, ...)": ("env", "env_id", "env_name"),
    "rollout.envs.make_vec(id, num_envs, max_episode_steps=...)": (
        "max_episode_steps",
        "episode_length",
    ),
    "agent.init(jax.random.key(seed))": ("seed", "random_seed", "random_state", "key"),
}

# Names of the packages, and the names that users of other libraries look for.
NAMES = {
    "rollout.Collector": ("Rollout", "RolloutWrapper", "Runner", "Sampler"),
    "rollout.Collector.collect_episodes": ("rollout_episodes",),
    "rollout.Collector.collect_steps": (
        *("collect", "collect_rollouts", "generate_unroll", "rollout"),
        *("RolloutBuffer", "RolloutStorage"),
    ),
    "rollout.buffers.EpisodeBuffer": ("EpisodeReplayBuffer",),
    "rollout.buffers.PrioritizedReplayBuffer": (
        *("PrioritisedReplayBuffer", "make_prioritised_flat_buffer"),
    ),
    "rollout.buffers.ReplayBuffer": (
        *("FlatBuffer", "ReplayMemory", "TrajectoryBuffer", "UniformReplayBuffer"),
        *("make_flat_buffer", "make_item_buffer", "make_trajectory_buffer"),
        *("n_step_bootstrapped_returns", "n_step_returns"),
    ),
    "rollout.checkpoint.restore": ("load_checkpoint",),
    "rollout.checkpoint.save": ("save_checkpoint", "save_model"),
    "rollout.discounted_returns": ("compute_returns", "discount_cumsum"),
    "rollout.envs.FrameStack": ("FrameStackObservation", "VecFrameStack"),
    "rollout.envs.NormalizeObs": (
        *("NormalizeObservation", "NormalizeVecObservation"),
    ),
    "rollout.envs.NormalizeHostEnv": ("VecNormalize",),
    "rollout.envs.env_ids": ("available_envs", "list_envs", "registered_envs"),
    "rollout.envs.from_gymnasium": ("GymWrapper", "GymnasiumWrapper", "from_gym"),
    "rollout.envs.make_vec": ("get_environment", "make_env", "make_vec_env"),
    "rollout.envs.types.Env": ("Environment", "JaxEnv"),
    "rollout.envs.vectorize": (
        *("AutoReset", "AutoResetWrapper", "DummyVecEnv", "SyncVectorEnv"),
        *("VecEnv", "VmapWrapper"),
    ),
    "rollout.evaluate": ("Evaluator", "eval", "evaluate_policy"),
    "rollout.gae": (
        *("GAE", "calculate_gae", "compute_advantages", "compute_gae"),
        *("generalized_advantage_estimation",),
        *("truncated_generalized_advantage_estimation",),
    ),
    "rollout.record_gif": ("RecordVideo", "record_video", "render"),
    "rollout.recipes.dqn.DQN": (),
    "rollout.recipes.load": ("load_agent", "load_model"),
    "rollout.recipes.ppo.Config": ("PPOConfig",),
    "rollout.recipes.ppo.PPO": ("PPOAgent",),
    "rollout.recipes.pqn.PQN": (),
    "rollout.recipes.recurrent_ppo.RecurrentPPO": (),
    "rollout.recipes.run": ("fit", "learn", "train"),
    "rollout.recipes.sac.SAC": (),
    "rollout.recipes.td3.TD3": (),
    "rollout.scan_minibatches": ("make_minibatches", "minibatch", "shuffle"),
    "rollout.summarize": ("LogWrapper", "RecordEpisodeStatistics"),
    "rollout.vtrace": ("vtrace_td_error_and_advantage",),
}
_INTERNAL = ("base", "cli", "kernel")  # packages outside of the API reference

# Members of classes, and their names in other libraries.
MEMBERS = {
    "Agent": {
        "agent.collector": ("collect", "collect_rollouts", "rollout"),
        "agent.collector.value(carry, params)": ("predict_values", "value"),
        "agent.env_steps(num_updates)": ("num_timesteps", "total_timesteps"),
        "agent.init": ("create", "reset", "setup"),
        "agent.predict": (
            *("act", "choose_action", "compute_single_action", "get_action"),
            "select_action",
        ),
        "agent.spec.action_space": ("action_space",),
        "agent.spec.observation_space": ("observation_space",),
        "agent.train": ("fit", "run"),
        "agent.update": ("step", "train_step", "training_step"),
        "rollout.checkpoint.save(path, state)": ("save", "save_checkpoint"),
        "rollout.evaluate(agent, state, key, num_episodes)": (
            *("eval", "evaluate", "evaluate_policy", "test"),
        ),
        "rollout.recipes.load(folder)": ("load", "restore"),
        "state.params": ("parameters", "params", "variables"),
    },
    "Collector": {
        "collector.collect_episodes": ("episodes",),
        "collector.collect_steps": (
            *("collect", "collect_rollouts", "generate_unroll", "rollout", "run"),
            *("sample", "unroll"),
        ),
        "collector.init": ("reset",),
        "rollout.evaluate(collector, params, key, num_episodes)": ("evaluate",),
    },
    "CollectStats": {
        "stats.lengths.mean": (
            *("episode_length", "episode_lengths", "length", "length_mean"),
            "mean_length",
        ),
        "stats.returns.mean": (
            *("episode_return", "episode_returns", "mean", "mean_return"),
            *("mean_reward", "return_mean", "reward", "rewards"),
        ),
        "stats.returns.std": ("return_std", "std", "std_reward"),
    },
    "Transition": {
        "trajectory.action": ("actions",),
        "trajectory.done": ("dones",),
        'trajectory.extras["log_prob"]': ("log_prob", "log_probs", "logp", "logprobs"),
        'trajectory.extras["value"]': ("value", "values"),
        "trajectory.next_obs": (
            *("next_observation", "next_observations", "next_state"),
        ),
        "trajectory.obs": ("observation", "observations", "state", "states"),
        "trajectory.reward": ("rewards",),
        "trajectory.terminated": ("terminal", "terminals", "termination"),
        "trajectory.truncated": ("timeout", "timeouts", "truncation"),
    },
}
MEMBERS["HostCollector"] = MEMBERS["Collector"]


def field_hint(name: str, fields: Iterable[str], show: Callable[[str], str]) -> str:
    """Returns a sentence with the field that a wrong name stands for, if there is one.

    Args:
        name: the wrong name, for example the name in another library.
        fields: names of the fields.
        show: function that formats the name of a field.
    """
    fields = list(fields)
    for field, (reason, aliases) in _COMPUTED.items():
        if field in fields and name in aliases:
            return f"Set {show(field)}: {reason}."
    matches = [x for x in _find(name, _FIELDS) if x in fields]
    matches = matches or difflib.get_close_matches(name, fields, n=1)
    return f"Did you mean {show(matches[0])}?" if matches else ""


def argument_hint(name: str) -> str:
    """Returns a sentence with the function here that has a field of other libraries."""
    calls = _find(name, ARGUMENTS)
    return f"It is an argument here: `{calls[0]}`." if calls else ""


def raise_missing(module: str, name: str) -> NoReturn:
    """Raises the `AttributeError` of a module, with the right name if it is known."""
    message = f"module {module!r} has no attribute {name!r}"
    hint = "" if name.startswith("_") else _module_hint(module, name)
    raise AttributeError(f"{message}{hint}", name=name, obj=sys.modules[module])


class Hints:
    """Base class whose errors for a missing attribute contain the right name."""

    if not TYPE_CHECKING:  # A type checker would accept every attribute.

        def __getattr__(self, name: str) -> Any:
            for cls in type(self).__mro__:
                if match := _find(name, MEMBERS.get(cls.__name__, {})):
                    raise AttributeError(
                        f"{type(self).__name__!r} object has no attribute {name!r}. "
                        f"Did you mean `{match[0]}`?"
                    )
            # Raises Python's error, or the error of a property that raised.
            return object.__getattribute__(self, name)


def _module_hint(module: str, name: str) -> str:
    """Returns a question with the full name of something in the packages."""
    matches = _find(name, NAMES)
    matches += [x for x in NAMES if x.rpartition(".")[2] == name]
    if not matches:
        homes = [x for x in sys.modules if x.startswith("rollout.")]
        homes = [x for x in homes if x.split(".")[1] not in _INTERNAL]
        paths = [f"{x}.{name}" for x in homes if _defines(sys.modules[x], name)]
        matches = sorted(paths, key=lambda x: (x.count("."), x))
    if not matches:
        names = importlib.import_module(module).__all__
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        matches = [f"{module}.{x}" for x in close]
    return f". Did you mean `{matches[0]}`?" if matches else ""


def _defines(module: ModuleType, name: str) -> bool:
    """Returns whether a module has a class, function or module of this library."""
    value = vars(module).get(name)
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return home.startswith("rollout.")


def _find(name: str, table: dict[str, tuple[str, ...]]) -> list[str]:
    """Returns the keys of a table of aliases that have this alias."""
    return [x for x, aliases in table.items() if name in aliases]
