"""TRIO_SMC_CONFIG and TRIO_SMC_DIRECTORY: precedence, origins, errors."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import trio

import trio_smc
from trio_smc import Config, load_settings
from trio_smc.sockets.enable import disable, enable


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "smc.toml"
    path.write_text('directory = "/from/file"\nreceive_buffer = 65536\n')
    return path


@pytest.mark.parametrize("named", ["variable", "argument"])
def test_origins(named: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument wins over a variable, a variable over a file, a file over the default."""
    if named == "variable":
        monkeypatch.setenv("TRIO_SMC_CONFIG", str(file))
    path = file if named == "argument" else None
    origin = str(file) if path else f"TRIO_SMC_CONFIG={file}"
    assert set(load_settings().origins.values()) <= {"default", "XDG_RUNTIME_DIR", origin}
    found = load_settings(path)
    assert (found.config.directory, found.config.receive_buffer) == ("/from/file", 65536)
    assert (found.origins["directory"], found.origins["receive_buffer"]) == (origin, origin)
    assert (found.origins["spin"], found.config.spin) == ("default", Config().spin)
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", "/from/variable")
    found = load_settings(path)
    assert found.config.private_directory() == Path("/from/variable")
    assert found.origins["directory"] == "TRIO_SMC_DIRECTORY"
    assert found.config.receive_buffer == 65536
    found = load_settings(path, directory="/from/argument")
    assert found.config.private_directory() == Path("/from/argument")
    assert found.origins["directory"] == "argument"
    # A configuration in the program has the last word; without a directory it has the variable's.
    assert Config(directory="/from/code").private_directory() == Path("/from/code")
    assert Config().private_directory() == Path("/from/variable")
    for name in ("TRIO_SMC_CONFIG", "TRIO_SMC_DIRECTORY"):
        monkeypatch.setenv(name, "")
    assert load_settings().config == Config()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TRIO_SMC_DIRECTORY", "smc", "'smc' is not an absolute path"),
        ("TRIO_SMC_DIRECTORY", "~/smc", "'~/smc' begins with ~, which only a shell"),
        ("TRIO_SMC_CONFIG", "~/smc.toml", "'~/smc.toml' begins with ~, which only a shell"),
        ("TRIO_SMC_DIRECTORY", "/" + "x" * 5000, "is not a path of 1 to 4095 bytes"),
        ("TRIO_SMC_CONFIG", "/nowhere", "/nowhere: No such file or directory"),
        ("TRIO_SMC_CONFIG", "/dev/zero", "/dev/zero: not a regular file"),
        ("TRIO_SMC_CONFIG", "x" * 5000, "is not a path of 1 to 4095 bytes"),
        ("TRIO_SMC_CONFIG", "FILE", "there is no setting 'colour'"),
    ],
    ids=lambda value: value[:24],
)
def test_wrong_values(
    name: str, value: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the variable, wherever the value is met first."""
    (tmp_path / "FILE").write_text("colour = 1")
    monkeypatch.setenv(name, str(tmp_path / value) if value == "FILE" else value)

    async def with_a_stack() -> None:
        async with trio_smc.open_stack():
            pass

    async def with_the_default_stack() -> None:
        await trio_smc.open_listeners(0, host="127.0.0.1")

    for call in (
        load_settings,
        enable,
        lambda: trio.run(with_a_stack),
        lambda: trio.run(with_the_default_stack),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            call()
        assert expected in str(caught.value)
        assert len(str(caught.value)) < 300
        printed = "".join(traceback.format_exception(caught.value))
        assert printed.count("Traceback") == 1, printed
        disable()


def test_a_set_user_id_program_ignores_its_caller(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_SMC_CONFIG", str(file))
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", "/from/variable")
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert load_settings().config == Config()
    assert Config().private_directory() != Path("/from/variable")


@pytest.fixture
def named_rnic(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('receive_buffer = 32768\nrnics = ["software:one"]\n')
    monkeypatch.setenv("TRIO_SMC_CONFIG", str(file))


@pytest.mark.usefixtures("named_rnic")
async def test_every_stack_without_settings_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "smc"
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", str(directory))
    async with trio_smc.open_stack() as one, trio_smc.open_stack() as two:
        # Each has an RNIC of its own, although one file names it.
        assert [each.name for stack in (one, two) for each in stack.rnics] == ["one", "one"]
        assert one.config.receive_buffer == 32768
        [listener] = await one.open_listeners(0, host="127.0.0.1")
        stream = await two.open_stream(*listener.socket.getsockname())
        other = await listener.accept()
        assert (stream.mode, other.mode) == ("smc-r", "smc-r")
        assert len(os.listdir(directory / "control")) == 2
        await stream.aclose()
        await other.aclose()
    async with trio_smc.open_stack(Config()) as own:
        assert own.config.receive_buffer is None
        assert own.config.private_directory() == directory
    [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
    [stack] = trio_smc.stacks()
    assert stack.config.receive_buffer == 32768
    await listener.aclose()


@pytest.mark.parametrize("runtime", ["/run/user/7", "run/user/7", "", None])
def test_one_function_finds_the_default_directory_and_its_origin(
    runtime: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative XDG_RUNTIME_DIR has no effect on the directory, and is not its origin."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    settings = load_settings()
    used = runtime == "/run/user/7"
    assert settings.origins["directory"] == ("XDG_RUNTIME_DIR" if used else "default")
    assert (settings.config.private_directory() == Path("/run/user/7/trio-smc")) is used
