"""`onefold doctor`: a healthy machine, and each problem with what is to be done about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import onefold
from onefold import backend, blas, machine
from onefold.cache.memory import device
from onefold.cache.model.kernels import current, trial
from onefold.cache.model.kernels.decode import Format, Shape
from onefold.cache.tiers.records.folder import Folder
from onefold.cli import doctor, doctor_device, doctor_install, main
from onefold.cli.doctor_finding import FAULTS, Finding, guarded
from onefold.engine import stock

ON_DEVICE = ["device", "blas", "memory", "forward", "kernels"]
KEYS = {"check", "state", "message", "remedy", "facts"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ONEFOLD_") and name != "ONEFOLD_BLAS"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    """What a whole run says here."""
    command = [sys.executable, "-m", "onefold", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process of the checks that need MLX."""
    fine = [Finding(name, "ok", "fine") for name in ON_DEVICE]
    monkeypatch.setattr(doctor, "on_device", lambda command: (fine, []))


def have(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], gpu: bool = False) -> None:
    """These distributions and no others."""
    names = [name for name in versions if name in backend.EXTRAS]
    monkeypatch.setattr(backend.sys, "platform", "linux")
    monkeypatch.setattr(backend, "names", lambda: names)
    monkeypatch.setattr(backend, "version_of", versions.get)
    monkeypatch.setattr(backend, "nvidia", lambda: gpu)


# -- the whole ---------------------------------------------------------------------------------------


def test_a_healthy_machine(healthy: dict[str, Any]) -> None:
    assert healthy["ok"] and healthy["problems"] == 0 and healthy["skipped"] == []
    assert healthy["onefold"] == onefold.__version__
    assert [check["check"] for check in healthy["checks"]] == ["versions", "backend", *ON_DEVICE]
    assert all(set(check) == KEYS and check["message"] for check in healthy["checks"])
    assert all(bool(check["remedy"]) == (check["state"] != "ok") for check in healthy["checks"])
    facts = {check["check"]: check["facts"] for check in healthy["checks"]}
    assert facts["versions"]["mlx"] and facts["versions"]["python"] and facts["versions"]["mlx-lm"]
    assert list(facts["backend"]["installed"]) == backend.names()
    assert facts["device"]["device"] in ("cpu", "gpu")
    assert facts["blas"]["gflops"] > 0 and facts["blas"]["blas"]
    assert facts["memory"]["default_budget_bytes"] < facts["memory"]["memory_bytes"]
    assert facts["forward"]["reused"] == doctor_device.KNOWN and facts["forward"]["difference"] < 1e-3


def test_what_people_see(healthy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(healthy)
    first, *checks, last = capsys.readouterr().out.splitlines()
    assert first == f"onefold {onefold.__version__}"
    assert len([line for line in checks if line.startswith(("ok ", "warning "))]) == 7
    assert last == "no problems" or healthy["warnings"]


def test_problems_have_their_remedy_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"check": "disk", "state": "problem", "message": "a\x1b[2J is full", "remedy": "Make room", "facts": {}}
    warned = {**found, "state": "warning"}
    report = {"onefold": "1", "checks": [found, found, warned], "skipped": ["forward"], "problems": 2, "warnings": 1}
    doctor.show(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["problem  disk      a?[2J is full", " " * 19 + "Make room"]
    assert lines[-2:] == ["not run: forward", "2 problems, 1 warning"]


@pytest.mark.parametrize("arguments", [["--nonsense"], ["now"], ["--disk"], ["--disk", " "], ["--js"]])
def test_nonsense_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.startswith("onefold doctor: ") and said.err.count("\n") == 1


@pytest.mark.usefixtures("no_device")
def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json", "--disk", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["checks"][-1]["check"] == "disk"
    (tmp_path / "file").touch()
    assert main(["doctor", "--disk", str(tmp_path / "file")]) == 1
    monkeypatch.setenv("ONEFOLD_DISK", str(tmp_path / "file"))
    assert main(["doctor"]) == 1
    monkeypatch.delenv("ONEFOLD_DISK")
    capsys.readouterr()
    warned = [Finding("memory", "warning", "little", "get more")]
    monkeypatch.setattr(doctor, "on_device", lambda command: (warned, []))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == 1


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str]) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "on_device", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_check_that_fails_is_a_problem(fault: type[Exception]) -> None:
    def check() -> Finding:
        raise fault("this\nand that")

    found = guarded("disk", check, "do so")
    assert (found.check, found.state, found.remedy) == ("disk", "problem", "do so")
    assert found.message == f"the check failed: this ({fault.__name__})"


# -- the installation ----------------------------------------------------------------------------------


def test_a_distribution_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"mlx": "0.32.4", "mlx-cpu": "0.32.4", "numpy": "2.0"})
    found = doctor_install.versions()
    assert (found.state, found.message) == ("problem", "mlx-lm and transformers not installed")
    assert found.remedy == "Run: pip install 'onefold[cpu]'"


def test_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"mlx": "0.32.4", "mlx-lm": "0.32.2", "numpy": "2.0", "transformers": "5"})
    report = doctor.examine(None)
    found = report["checks"][-1]
    assert not report["ok"] and report["skipped"] == ON_DEVICE
    assert (found["check"], found["state"]) == ("backend", "problem")
    assert found["message"] == "MLX has no backend here: the mlx package brings none on Linux"
    assert found["remedy"].startswith("Run: pip install 'onefold[cpu]'")


@pytest.mark.usefixtures("no_device")
def test_two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}, gpu=True)
    found = doctor_install.check_backend()
    assert found.state == "problem" and found.message.startswith("mlx-cpu and mlx-cuda-13 are installed together")
    keep = "pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"
    assert found.remedy == f"Run: pip uninstall -y mlx-cpu && {keep}"
    assert found.facts["installed"] == {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    assert doctor_device.reinstall() == found.remedy
    assert not doctor.examine(None)["ok"]


def test_a_backend_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"mlx": "0.32.4", "mlx-cpu": "0.32.3"})
    found = doctor_install.check_backend()
    assert (found.state, found.message) == ("problem", "mlx-cpu 0.32.3 is installed with mlx 0.32.4")
    assert found.remedy == "Run: pip install --force-reinstall --no-deps mlx-cpu==0.32.4"


def test_a_gpu_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"mlx": "0.32.4", "mlx-cpu": "0.32.4"}, gpu=True)
    found = doctor_install.check_backend()
    assert found.state == "warning" and "NVIDIA GPU" in found.message
    assert found.remedy.endswith("pip uninstall -y mlx-cpu && pip install 'onefold[cuda13]'")


# -- the folder --------------------------------------------------------------------------------------------


def tree(folder: Path) -> list[tuple[str, int, int]]:
    """What lies there, and when it was changed."""
    there = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in there]


def test_folders_that_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, empty = tmp_path / "ours", tmp_path / "empty"
    empty.mkdir()
    Folder.make(ours).unlock()
    before = tree(tmp_path)
    for path, exists in ((ours, True), (empty, True), (tmp_path / "to" / "make", False)):
        found = doctor_install.disk(str(path))
        assert (found.state, found.remedy) == ("ok", ""), found
        assert found.facts["exists"] == exists and found.facts["free_bytes"] > 0
        assert found.message.startswith(str(path)) and ("can be made" in found.message) != exists
    assert tree(tmp_path) == before
    monkeypatch.setattr(Folder, "bytes", lambda self: 5_000_000)
    assert doctor_install.disk(str(ours)).message.endswith("free and 5.0 MB of records")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_install.os, "access", lambda path, mode: False)
    for path in (tmp_path, tmp_path / "not" / "there"):
        found = doctor_install.disk(str(path))
        assert (found.state, found.message) == ("problem", f"{tmp_path} cannot be written to")
        assert found.remedy.startswith("Make it writable for you")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    for mode, said in ((0o500, "cannot be written to"), (0o300, "cannot be read: Permission denied")):
        tmp_path.chmod(mode)
        found = doctor_install.disk(str(tmp_path))
        tmp_path.chmod(0o700)
        assert found.state == "problem" and said in found.message


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor_install.Path, "iterdir", refused)
    found = doctor_install.disk(str(tmp_path))
    assert (found.state, found.message) == ("problem", f"{tmp_path} cannot be read: Permission denied")


def test_a_folder_that_is_locked(tmp_path: Path) -> None:
    held = Folder.make(tmp_path / "ours")
    try:
        found = doctor_install.disk(str(tmp_path / "ours"))
    finally:
        held.unlock()
    assert found.state == "problem" and found.facts["locked_by"] == f"process {os.getpid()}"
    assert found.message == f"{tmp_path / 'ours'} is in use by process {os.getpid()}"
    assert found.remedy.startswith(f"Stop process {os.getpid()}, or give another folder")
    assert doctor_install.disk(str(tmp_path / "ours")).state == "ok"


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    found = doctor_install.disk(str(tmp_path))
    assert (found.state, found.message) == ("problem", f"{tmp_path} is not a cache of Onefold's")
    found = doctor_install.disk(str(tmp_path / "thesis.txt"))
    assert (found.state, found.message) == ("problem", f"{tmp_path / 'thesis.txt'} is a file, not a folder")
    found = doctor_install.disk(str(tmp_path / "thesis.txt" / "below"))
    assert (found.state, found.remedy) == ("problem", "Give a folder with --disk")


@pytest.mark.parametrize("free, state", [(500_000_000, "warning"), (5_000_000, "problem")])
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    monkeypatch.setattr(doctor_install.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = doctor_install.disk(str(tmp_path))
    assert found.state == state and "which is little" in found.message and found.remedy.startswith("Make room")


# -- the device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used, state, remedy", [
    ("MLX's own (no other was found)", "problem", "Run: pip install 'onefold[cpu]'"),
    ("MLX's own (ONEFOLD_BLAS=off)", "problem", "Unset ONEFOLD_BLAS"),
    ("MLX's own (mlx was imported first)", "problem", "Import onefold before mlx.core"),
    ("/lib/libopenblas.so (the system's OpenBLAS)", "warning", "See whether the machine is busy"),
])  # fmt: skip
def test_a_slow_blas(monkeypatch: pytest.MonkeyPatch, used: str, state: str, remedy: str) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(doctor_device, "gflops", lambda: 1.25)
    monkeypatch.setattr(blas, "in_use", lambda: used)
    found = doctor_device.check_blas()
    assert (found.state, found.message) == (state, f"{used}, 1.2 GFLOP/s, which is slow")
    assert found.remedy.startswith(remedy)
    monkeypatch.setattr(doctor_device, "gflops", lambda: 25.0)
    assert doctor_device.check_blas().state == "ok"


@pytest.mark.parametrize("n_bytes, state", [(500_000_000, "problem"), (3_000_000_000, "warning"), (1 << 35, "ok")])
def test_little_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int, state: str) -> None:
    monkeypatch.setattr(device, "memory_bytes", lambda: n_bytes)
    monkeypatch.setattr(device, "gauge", lambda: None)
    found = doctor_device.memory()
    assert found.state == state and bool(found.remedy) == (state != "ok")
    assert found.facts["default_budget_bytes"] == n_bytes * 4 // 5


@pytest.mark.parametrize("level", machine.Level)
def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch, level: machine.Level) -> None:
    reading = machine.Reading(level, "1.0 GB of 32.0 GB are available")
    monkeypatch.setattr(device, "memory_bytes", lambda: 1 << 35)
    monkeypatch.setattr(device, "gauge", lambda: lambda: reading)
    found = doctor_device.memory()
    assert found.state == ("ok" if level is machine.Level.NORMAL else "warning")
    assert (reading.why in found.message) == (level is not machine.Level.NORMAL)
    assert found.facts["memory_level"] == level.name.lower()


def test_a_forward_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_device.forward().state == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(doctor_device, "TOLERANCE", -1.0)
        found = doctor_device.forward()
        assert found.state == "problem" and "differ from a fresh run's" in found.message
        assert found.remedy == doctor_device.REPORT
    with monkeypatch.context() as patch:
        lease = onefold.PrefixCache.lease
        apart = lambda cache, tokens: lease(cache, tokens, namespace=str(len(tokens)))  # noqa: E731
        patch.setattr(onefold.PrefixCache, "lease", apart)
        found = doctor_device.forward()
        assert found.state == "problem" and found.message.startswith("a small model reused 0 tokens of 96")


def test_a_cuda_backend_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(backend, "names", lambda: ["mlx-cuda-13"])
    found = doctor_device.device()
    assert (found.state, found.message) == ("problem", "a CUDA backend is installed, and MLX finds no GPU")
    assert "nvidia-smi" in found.remedy


def test_its_process_goes_on_after_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: Any) -> Any:
        raise RuntimeError("[metal] no such kernel")

    monkeypatch.setattr(stock, "random_llama", fails)
    monkeypatch.setattr(doctor_device, "gflops", fails)
    assert doctor_device.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["begins"] for line in lines[::2]] == ON_DEVICE
    states = {line["finding"]["check"]: line["finding"]["state"] for line in lines[1::2]}
    assert states["device"] == "ok" and states["blas"] == states["forward"] == "problem"


def child(code: str) -> list[str]:
    return [sys.executable, "-c", f"import json, os, signal, sys, time\n{code}"]


BEGIN = 'print("noise"); print(json.dumps({"begins": "device"})); '
FINE = 'print(json.dumps({"finding": {"check": "device", "state": "ok", "message": "cpu"}})); print([1]); '


@pytest.mark.parametrize("code, check, said", [
    (BEGIN + "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", "device", "was ended by SIGKILL"),
    (BEGIN + FINE + 'print(json.dumps({"begins": "blas"})); sys.exit("libgomp is missing")', "blas",
     "failed with exit code 1: libgomp is missing"),
    ("sys.exit(3)", "device", "failed with exit code 3: it gave no reason"),
    (BEGIN + FINE + 'print(json.dumps({"begins": "blas"}), flush=True); time.sleep(600)', "blas",
     "did not finish in 2 seconds"),
])  # fmt: skip
def test_a_process_that_ends_early_is_a_problem_of_its_check(code: str, check: str, said: str) -> None:
    for seconds in (2, 10, 60) if "sleep" in code else (60,):
        found, skipped = doctor.on_device(child(code), seconds=seconds)
        if found[-1].check == check:  # a busy machine may not have begun it after two
            break
    assert (found[-1].check, found[-1].state) == (check, "problem")
    assert found[-1].message == f"the process of this check {said.replace('2 seconds', f'{seconds} seconds')}"
    assert found[-1].remedy.startswith("Run: pip install --force-reinstall --no-deps mlx==")
    assert [f.check for f in found] + skipped == ON_DEVICE


def test_without_a_device_the_other_checks_are_not_run() -> None:
    found, skipped = doctor.on_device(child(BEGIN + FINE.replace('"ok"', '"problem"')))
    assert [f.state for f in found] == ["problem"] and skipped == ON_DEVICE[1:]


# -- kernels --------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A device with a kernel, and what its trials find."""
    found: dict[str, Any] = {"kept": {}, "reasons": {}, "repeated": []}

    def repeat(one: trial.Trial, seconds: float) -> str:
        found["repeated"].append(one)
        return found["reasons"].get(one.heads, "")

    monkeypatch.setattr(current, "device_kernel", object)
    monkeypatch.setattr(trial, "kept", lambda: found["kept"])
    monkeypatch.setattr(trial, "repeat", repeat)
    monkeypatch.delenv("ONEFOLD_KERNELS", raising=False)
    return found


def some_trial(heads: int) -> trial.Trial:
    return trial.Trial(Shape(64, 64, mx.bfloat16, Format("plain", 2)), heads, 2)


def test_the_kernel_is_tried_for_a_usual_shape_where_none_was_used(tried: dict[str, Any]) -> None:
    found = doctor_device.kernels()
    assert found.state == "ok" and "heads of 128 in float16, 32 on 8" in found.message
    assert [one.heads for one in tried["repeated"]] == [32]


def test_trials_are_repeated_for_the_shapes_that_were_used_last(tried: dict[str, Any]) -> None:
    tried["kept"] = {str(n): some_trial(n) for n in (4, 6, 8, 10)}
    assert doctor_device.kernels().state == "ok"
    assert [one.heads for one in tried["repeated"]] == [6, 8, 10]


def test_a_kernel_that_differs_is_a_warning(tried: dict[str, Any]) -> None:
    tried["kept"], tried["reasons"] = {"a": some_trial(4), "b": some_trial(6)}, {6: "a case differs by 0.3"}
    found = doctor_device.kernels()
    assert found.state == "warning" and "6 on 2: a case differs by 0.3" in found.message and found.remedy
    assert found.facts["trials"] == {str(some_trial(4)): "", str(some_trial(6)): "a case differs by 0.3"}


def test_a_kernel_that_is_switched_off_is_a_warning(tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFOLD_KERNELS", "off")
    found = doctor_device.kernels()
    assert found.state == "warning" and "ONEFOLD_KERNELS switches them off" in found.message
    assert found.remedy == "Unset ONEFOLD_KERNELS to use them"
