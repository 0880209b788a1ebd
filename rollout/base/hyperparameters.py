"""`Hyperparameters`: a base class of configs whose errors name the right field."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Self

# Names in other libraries, and the names here.
_OTHER_NAMES = {
    "num_updates": ("num_iterations", "n_updates"),
    "num_steps": ("n_steps", "train_freq", "rollout_length", "unroll_length"),
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


class Hyperparameters:
    """Base class of a config: an error for a wrong name contains the right name.

    A subclass is a frozen dataclass.

    Raises:
        TypeError: if a keyword argument is not a field.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:  # noqa: D102
        del args
        names = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        for name in values.keys() - names.keys():
            hint = name_hint(name, names, "`{}`".format)
            hint = hint or f"The fields are {', '.join(names)}."
            raise TypeError(f"`{name}` must be a field of `{cls.__qualname__}`. {hint}")
        return super().__new__(cls)


def name_hint(name: str, names: Iterable[str], show: Callable[[str], str]) -> str:
    """Returns a sentence with the field that a wrong name stands for, if there is one.

    Args:
        name: the wrong name, for example the name in another library.
        names: names of the fields.
        show: function that formats the name of a field.
    """
    names = list(names)
    for field, (reason, aliases) in _COMPUTED.items():
        if field in names and name in aliases:
            return f"Set {show(field)}: {reason}."
    fields = [x for x, aliases in _OTHER_NAMES.items() if name in aliases]
    matches = [x for x in fields if x in names]
    matches = matches or difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {show(matches[0])}?" if matches else ""
