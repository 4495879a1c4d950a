"""Loading of ``--model``: a name that core or a plugin provides, or ``FILE.py:FACTORY``, a user's own.

Torch is imported only when a model is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtb_core.api.descriptions import ModelInfo, construct
from mtb_core.api.errors import ConfigError, MtbError
from mtb_core.api.options import NoOptions, nearest, parse_options
from mtb_core.api.values import ModelSpec
from mtb_core.config.schema import TrainConfig

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


def check_model(model: str, *, named: Mapping[str, ModelInfo]) -> None:
    """Check what can be checked without importing anything: the name is known, or the file exists.

    Raises:
        ConfigError: it is not.
    """
    if model in named:
        return
    file, factory = _split(model, named)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ConfigError(
            f"--model {model}: the file '{file}' {what} (looked in '{Path.cwd()}'); give the path of a Python file."
        )
    if not factory.isidentifier():
        raise ConfigError(
            f"--model {model} names no factory in '{file}' (got {factory!r}); write FILE.py:FACTORY, where FACTORY is "
            "a function or class in it that returns the model."
        )


def model_options(config: TrainConfig, named: Mapping[str, ModelInfo]) -> Any:
    """The options of the model that `config` names.

    Raises:
        ConfigError: it has no such options, or not these values.
    """
    info = named.get(config.model)
    options = NoOptions if info is None else info.options
    return parse_options(options, config.model_opt, owner=f"model '{config.model}'")


def load_model(config: TrainConfig, *, named: Mapping[str, ModelInfo]) -> ModelSpec:
    """The model that `config` names. Runs the user's code; to be called in each worker.

    A factory in a file is called without arguments, or with `config` if it has a parameter without a default. It returns a `ModelSpec` or a module; a module's blocks are the children of its longest
    ``ModuleList``, and it initialises itself under the run's seed.

    Raises:
        ConfigError: nothing such exists, it cannot be loaded, or it lacks what `config` needs.
    """
    check_model(config.model, named=named)
    if config.model in named:
        spec = construct(named[config.model], model_options(config, named), config)
        if not isinstance(spec, ModelSpec):
            raise ConfigError(f"--model {config.model} must give a ModelSpec; it gave {type(spec).__name__}.")
    else:
        spec = _from_file(config, named)
    if config.activation_checkpointing and not spec.blocks:
        raise ConfigError(
            f"--activation-checkpointing recomputes a model's blocks, but --model {config.model} names none; return a "
            "ModelSpec with blocks from the factory, keep the blocks in an nn.ModuleList, or leave the option out."
        )
    return spec


def _split(model: str, named: Mapping[str, ModelInfo]) -> tuple[Path, str]:
    """File and factory of a model that is not named."""
    file, colon, factory = model.rpartition(":")
    if not colon:
        file, factory = model, ""
    if not file.endswith(".py"):
        raise ConfigError(
            f"There is no model '{model}'.{nearest(model, named)} Valid: {', '.join(sorted(named))}, or FILE.py:FACTORY "
            "for your own."
        )
    return Path(file).expanduser(), factory


def _from_file(config: TrainConfig, named: Mapping[str, ModelInfo]) -> ModelSpec:
    from torch import nn  # noqa: PLC0415

    from .aside import streams_kept  # noqa: PLC0415

    file, name = _split(config.model, named)
    module = _import_file(file, config.model)
    factory = getattr(module, name, None)
    if factory is None:
        known = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        ]
        listed = f"it defines {', '.join(known)}." if known else "it defines no function or class."
        raise ConfigError(f"--model {config.model}: '{file}' has no '{name}';{nearest(name, known)} {listed}")
    make = _bound(factory, config)
    # The first call shows what the factory returns; like all later ones it must not disturb the run's randomness.
    with streams_kept():
        try:
            made = make()
        except MtbError:
            raise
        except Exception as error:
            raise ConfigError(f"--model {config.model}: the factory failed: {_cause(error)}.") from error
    if isinstance(made, ModelSpec):
        return made
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"--model {config.model}: the factory returned {type(made).__name__}; it must return a torch.nn.Module or "
            "an mtb_core.ModelSpec."
        )
    return ModelSpec(build=make, blocks=_longest_list(made))


def _import_file(file: Path, model: str) -> ModuleType:
    path = file.resolve()
    # A name of its own for each path, known to `sys.modules`, as pickle and dataclasses need it.
    name = f"mtb_user_model_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the modules beside it; last, so that they hide nothing
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"--model {model}: importing '{file}' failed: {_cause(error)}.") from error
    return module


def _bound(factory: Any, config: TrainConfig) -> Callable[[], Any]:
    """`factory` as a function without arguments."""
    if not callable(factory):
        raise ConfigError(
            f"--model {config.model} is {type(factory).__name__}, not a function or class; it must be callable and "
            "return the model."
        )
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(required) > 1 or any(p.kind not in by_position for p in required if p.name != "config"):
        raise ConfigError(
            f"--model {config.model} needs the arguments {', '.join(p.name for p in required)}; a factory takes none, "
            "or one: the run's TrainConfig. Give the others defaults."
        )
    if required and required[0].kind not in by_position:
        return lambda: factory(config=config)
    return (lambda: factory(config)) if required else factory


def _longest_list(module: nn.Module) -> tuple[str, ...]:
    """Names of the children of the longest ``ModuleList``; the outermost first one among equals."""
    from torch import nn  # noqa: PLC0415

    lists = [(name, len(m)) for name, m in module.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        return ()
    name, length = max(lists, key=lambda item: item[1])
    return tuple(f"{name}.{i}".removeprefix(".") for i in range(length))


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(" .:")
