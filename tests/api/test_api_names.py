"""The public names: all of them exist and are documented, and no other name is public."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import re
import sys
import traceback
from importlib import import_module
from importlib.resources import files
from pkgutil import walk_packages
from types import ModuleType
from typing import get_type_hints

import pytest
import trio

import trio_smc

NAMES = {
    "Agreed", "BaseObserver", "Config", "ConnectionCursors", "ConnectionView", "EventStream",
    "Fallback", "FallbackReason", "LinkGroup", "LinkGroupKind", "LinkView", "Mode", "NoStack",
    "Observer", "Origin", "ProtocolError", "RmbView", "RnicError", "Settings", "SmcListener",
    "SmcSocket", "SmcStream", "SmcUnavailable", "SoftRnic", "Stack", "StackEvent",
    "StackStatistics", "StreamStatistics", "VerbsRnic", "disable", "enable", "load_config",
    "load_settings", "open_events", "open_listeners", "open_stack", "open_stream", "serve",
    "set_up_tcp_option", "stacks", "tear_down_tcp_option",
}  # fmt: skip
CLASSES = sorted(name for name in NAMES if isinstance(getattr(trio_smc, name), type))
LATE_ANNOTATIONS = ("Config", "SmcStream")
"""Their annotations name classes that only type checkers import."""
SEPARATE = ("trio_smc.tools", "trio_smc.adapters")
"""Packages that are no part of the module trio_smc."""
CAUGHT = {
    "DamagedCapture", "DeliveryUnknown", "DirectoryUnusable", "HandshakeCut", "IllegalEvent",
    "MessageMissing", "NoThread", "QueueFull", "WaitEnded", "_DumpInterrupted", "_SilentClient",
}  # fmt: skip
"""Exceptions that no public function raises: trio_smc catches them, or has a fault of its own."""
FUNCTIONS = ("open_stream", "open_listeners", "open_stack", "serve")


def public_methods(owner: type) -> list[tuple[str, object]]:
    return [
        (name, member)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]


def test_all_names_are_exported_and_no_others() -> None:
    assert set(trio_smc.__all__) == NAMES
    assert len(trio_smc.__all__) == len(NAMES)
    public = {
        name
        for name, value in vars(trio_smc).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations"} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_class_and_function_names_the_public_module(name: str) -> None:
    """In tracebacks, `help` and pickles."""
    thing = getattr(trio_smc, name)
    assert (thing.__module__, thing.__qualname__) == ("trio_smc", name)
    assert pickle.loads(pickle.dumps(thing)) is thing


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1]


def test_tracebacks_name_public_exceptions() -> None:
    fallback = trio_smc.Fallback.local(trio_smc.FallbackReason.NO_RNIC)
    for error in (trio_smc.SmcUnavailable(fallback), trio_smc.ProtocolError("wrong")):
        assert last_line(error).startswith(f"trio_smc.{type(error).__name__}: ")


async def test_tracebacks_of_a_stack_that_cannot_be_opened() -> None:
    config = trio_smc.Config(rnics=(trio_smc.SoftRnic(),))
    async with trio_smc.open_stack(config):
        with pytest.raises(trio_smc.RnicError) as refused:
            async with trio_smc.open_stack(config):
                pass
    assert last_line(refused.value).startswith("trio_smc.RnicError: ")


def test_each_exception_is_public_or_caught() -> None:
    for found in walk_packages(trio_smc.__path__, "trio_smc."):
        if not found.name.startswith(SEPARATE):
            with contextlib.suppress(ImportError):  # a module for another processor or library
                import_module(found.name)
    theirs = {
        each.__name__
        for name, module in list(sys.modules.items())
        if name.startswith("trio_smc") and not name.startswith(SEPARATE)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, BaseException)
        and each.__module__.startswith("trio_smc") and not each.__module__.startswith(SEPARATE)
    }  # fmt: skip
    assert theirs == CAUGHT | {"NoStack", "ProtocolError", "RnicError", "SmcUnavailable"}


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in LATE_ANNOTATIONS])
def test_annotations_of_public_classes_can_be_evaluated(name: str) -> None:
    """Serializers do that."""
    cls = getattr(trio_smc, name)
    assert set(get_type_hints(cls)) >= set(inspect.get_annotations(cls))


def test_names_are_in_all_for_type_checkers() -> None:
    assert files("trio_smc").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_documented(name: str) -> None:
    thing = getattr(trio_smc, name)
    assert inspect.getdoc(thing)
    assert thing.__doc__ is not None, "the docstring is inherited"


@pytest.mark.parametrize("name", CLASSES)
def test_each_method_is_documented(name: str) -> None:
    for method, member in public_methods(getattr(trio_smc, name)):
        assert inspect.getdoc(member), f"{name}.{method}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_explained(name: str) -> None:
    function = getattr(trio_smc, name)
    text = inspect.getdoc(function) or ""
    assert "Raises:" in text
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"\b{parameter}\b", text), parameter


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "open_stack"])
def test_stack_has_the_same_functions(name: str) -> None:
    here = inspect.signature(getattr(trio_smc, name))
    there = inspect.signature(getattr(trio_smc.Stack, name))
    assert list(there.parameters.values())[1:] == list(here.parameters.values())


@pytest.mark.parametrize(
    ("ours", "trios"),
    [
        (trio_smc.open_stream, trio.open_tcp_stream),
        (trio_smc.open_listeners, trio.open_tcp_listeners),
        (trio_smc.serve, trio.serve_tcp),
    ],
)
def test_functions_are_trios_with_a_config(ours: object, trios: object) -> None:
    here = dict(inspect.signature(ours).parameters)  # type: ignore[arg-type]
    there = dict(inspect.signature(trios).parameters)  # type: ignore[arg-type]
    assert here.pop("config").default is None
    assert [*here] == [*there]
    for name, parameter in there.items():
        assert here[name].kind == parameter.kind, name
        if name != "task_status":
            assert here[name].default == parameter.default, name


def test_kinds_of_objects() -> None:
    assert issubclass(trio_smc.SmcStream, trio.abc.HalfCloseableStream)
    assert issubclass(trio_smc.SmcListener, trio.abc.Listener)
    assert issubclass(trio_smc.SmcUnavailable, OSError)
    assert [*trio_smc.Mode] == ["smc-r", "tcp"]
    assert [*trio_smc.Origin] == ["local", "peer"]
    assert [*trio_smc.LinkGroupKind] == ["single", "asymmetric", "symmetric"]
