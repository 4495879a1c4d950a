from __future__ import annotations

import subprocess
import sys

import pytest

from mtb_core import PLUGIN_API, ConfigError, load_reference, parse_options
from mtb_sinks import plugin


def test_it_states_the_api_it_was_written_for():
    """Core compares this number before it uses the plugin."""
    assert PLUGIN_API == plugin.PLUGIN_API


@pytest.mark.parametrize("sink", plugin.mtb_sinks(), ids=lambda sink: sink.name)
def test_every_sink_can_be_made_from_its_description(sink):
    """The reference leads to a class that takes the declared options."""
    load_reference(sink.impl)(sink.options())


def test_options_are_checked_before_anything_starts():
    """A port out of range, or a misspelt option, is refused with what is valid."""
    options = {sink.name: sink.options for sink in plugin.mtb_sinks()}
    with pytest.raises(ConfigError, match="from 0 to 65535"):
        parse_options(options["prometheus"], {"port": "70000"}, owner="sink 'prometheus'")
    with pytest.raises(ConfigError, match="Did you mean 'folder'"):
        parse_options(options["tensorboard"], {"foldr": "x"}, owner="sink 'tensorboard'")


def test_describing_the_sinks_imports_nothing_heavy():
    """`mtb --help` loads this module in every process."""
    program = "import sys, mtb_sinks.plugin as p; p.mtb_sinks(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not {"torch", "numpy", "tensorboard", "prometheus_client", "google"} & loaded
