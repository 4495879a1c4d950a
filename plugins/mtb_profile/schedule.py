"""Which steps of a training are recorded. Torch-free, so that a wrong schedule is refused at once."""

from __future__ import annotations

import attrs

from mtb_core import ConfigError, TrainConfig


@attrs.frozen
class Schedule:
    """What the profiler does when.

    After the benchmark's warm-up, `wait` steps pass, in `warmup` more the profiler runs and forgets, and then `active`
    are recorded. With `memory`, allocations are recorded too.

    Raises:
        ConfigError: a number is too small.
    """

    wait: int = 1
    warmup: int = 1
    active: int = 10
    memory: bool = False

    def __attrs_post_init__(self) -> None:
        for option, value, least in (
            ("--profile-wait", self.wait, 0),
            ("--profile-warmup", self.warmup, 0),
            ("--profile-active", self.active, 1),
        ):
            if value < least:
                raise ConfigError(f"{option} is {value}; it must be at least {least}.")

    @property
    def steps(self) -> int:
        """Measured steps that this takes."""
        return self.wait + self.warmup + self.active

    def fit(self, config: TrainConfig) -> TrainConfig:
        """`config` with as many steps as this takes, where it does not say how many.

        Raises:
            ConfigError: it says too few, or asks for what cannot be profiled.
        """
        if config.repeat != 1:
            raise ConfigError(f"--repeat is {config.repeat}, but a profile is of one trial; leave it out.")
        if config.until_step is not None:
            raise ConfigError(
                f"--until-step {config.until_step} is set, but how many steps a profile needs is counted from its start; "
                f"use --steps, at least {self.steps}."
            )
        if config.steps is None:
            return attrs.evolve(config, steps=self.steps)
        if config.steps < self.steps:
            raise ConfigError(
                f"--steps is {config.steps}, but the profile needs {self.steps}: --profile-wait {self.wait}, "
                f"--profile-warmup {self.warmup} and --profile-active {self.active}. Take more steps or record fewer."
            )
        return config
