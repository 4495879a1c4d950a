"""Shared by the tests of core."""

import itertools
import textwrap

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

_numbers = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(body, entry="x", dist="mtb-x")``: put a real distribution with one plugin module on the path.

    Returns the folder that holds it, for ``PYTHONPATH`` of another process. `body` is the module's source; PLUGIN_API
    and the usual imports are put before it unless ``bare``. `target` replaces the entry point's target, where
    ``{module}`` is the module's name.
    """

    def install(body="", *, entry="x", dist="mtb-x", version="1.0", target="{module}", bare=False, entry_points=None):
        number = next(_numbers)
        module = f"fake_plugin_{number}"
        site = tmp_path / f"site{number}"
        info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n\ntext\n")
        points = f"[mtb]\n{entry} = {target.format(module=module)}\n" if entry_points is None else entry_points
        (info / "entry_points.txt").write_text(f"[console_scripts]\nother = a:b\n\n{points}")
        head = "" if bare else "from mtb_core.api import *\nfrom mtb_core.api import hookimpl\nPLUGIN_API = 2\n"
        (site / f"{module}.py").write_text(head + textwrap.dedent(body))
        monkeypatch.syspath_prepend(site)
        return site

    return install


STRATEGY = """
@hookimpl
def mtb_strategies():
    return [StrategyInfo("{name}", "A test's.", "{impl}", lambda options, config, world: None)]
"""


@pytest.fixture
def strategy_body():
    """``strategy_body(name)``: source of a plugin module that provides the strategy `name`."""
    return lambda name, impl="nowhere:Strategy": STRATEGY.format(name=name, impl=impl)


# How fast a machine is that others use as well is no property of the code.
hypothesis_settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("any machine")
