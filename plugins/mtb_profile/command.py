"""``mtb profile``: profile a training, analyse traces."""

from __future__ import annotations

import click


class _RunByDefault(click.Group):
    """``mtb profile --steps 3`` is ``mtb profile run --steps 3``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``run`` in front of options that are not the group's own."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args] if args[0].startswith("-") else args
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault, context_settings={"ignore_unknown_options": True})
def profile() -> None:
    """Profile a training, or analyse traces of PyTorch.

    `run` (the default) trains as `mtb train` does, with the same options, under torch.profiler, and analyses the traces.
    `analyze` reads traces of any PyTorch program: one rank or many, CPU with gloo or CUDA with NCCL.
    """


def _add_commands() -> None:
    from .analyze_command import analyze_command  # noqa: PLC0415  (click's group must exist first)
    from .run_command import run_command  # noqa: PLC0415

    profile.add_command(run_command)
    profile.add_command(analyze_command)


_add_commands()
