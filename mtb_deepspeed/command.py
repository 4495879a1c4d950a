"""``mtb deepspeed``: ``mtb train`` with strategy ``deepspeed`` and its options spelled out."""

from __future__ import annotations

import click

from mtb_core import GroupedOption, train_command

_OPTIONS: dict[str, click.Option] = {
    "stage": GroupedOption(
        ["--zero-stage"],
        metavar="0|1|2|3",
        help="What is split over ranks: nothing, optimizer state, gradients too, parameters too. [default: 2]",
    ),
    "offload_optimizer": GroupedOption(
        ["--offload-optimizer"], metavar="none|cpu", help="Keep and update fp32 weights and optimizer state there."
    ),
    "contiguous_gradients": GroupedOption(
        ["--contiguous-gradients/--no-contiguous-gradients"],
        default=None,
        help="Copy gradients into one buffer as they come.",
    ),
    "overlap_comm": GroupedOption(
        ["--overlap-comm/--no-overlap-comm"], default=None, help="Reduce gradients while backward runs."
    ),
    "reduce_bucket_size": GroupedOption(
        ["--reduce-bucket-size"], metavar="N", help="Elements of gradients reduced at a time."
    ),
    "allgather_bucket_size": GroupedOption(
        ["--allgather-bucket-size"], metavar="N", help="Elements of weights gathered at a time."
    ),
    "config": GroupedOption(
        ["--deepspeed-config"], metavar="FILE.json", help="DeepSpeed's own configuration file, instead of the above."
    ),
}

command = train_command(
    "deepspeed",
    "deepspeed",
    _OPTIONS,
    help="Train with DeepSpeed's ZeRO and measure it: `mtb train --strategy deepspeed`. `mtb plugins show deepspeed` "
    "lists further options, for --strategy-opt.",
)
