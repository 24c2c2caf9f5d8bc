"""The measuring process may hang, crash or never start: the kernel is named, the others go on.

The processes here speak the worker's protocol and do what kernels do to a real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from autotuned import until
from sweeps import GPU

from warploom.errors import DeviceError
from warploom.tuning.gpu import About, Batch, GpuProcess, visible
from warploom.tuning.problems import Problem

LIMIT = 10  # seconds that a process may be silent
WORKER = """
import json, os, signal, sys, time
fates = json.loads(sys.argv[1])
say = lambda message: print(json.dumps(message), flush=True)
time.sleep(fates.get("starting", 0))
if "error" in fates:
    say({"error": {"value": "no GPU", "rule": fates["error"], "fix": "none"}})
    sys.exit(1)
if "greeting" in fates:
    print(fates["greeting"], flush=True)
say({"gpu": "NVIDIA H200", "multiprocessors": 132})
for line in sys.stdin:
    request = json.loads(line)
    kernels, results, number = request["kernels"], {}, request["number"]
    say({"trying": None})
    if fates.get("preparing") == "die":
        os._exit(7)
    for name in kernels:
        say({"trying": name})
        fate = next((f for part, f in fates.items() if name.endswith(part)), "correct")
        if fate in ("hang", "sleep"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if fate == "hang":
                print("silence", flush=True)
            open(sys.argv[0] + ".hangs", "w").close()
            time.sleep(3600)
        if fate == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fate == "illegal":
            say({"illegal": "an illegal memory access was encountered"})
            os._exit(1)
        if fate == "exit":
            os._exit(3)
        if fate == "real-time":
            os.kill(os.getpid(), signal.SIGRTMIN + 6)
        if fate == "killed once" and not os.path.exists(sys.argv[0] + ".killed"):
            open(sys.argv[0] + ".killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "killed once":
            fate = "correct"
        if fate == "torn":
            print('{"results": {"gemm', end="", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        said = ("hello", "[3]", "[" * 5000, '{"results": {}}', '{"trying": 3}', '{"trying": [3]}')
        if fate in said:
            print(fate, flush=True)
        results[name] = {"outcome": fate, "reason": "" if fate == "correct" else "as told"}
        if fate == "correct":
            results[name] |= {"seconds": 1.0, "spread": 0.0, "relative": 1.0}
        if fate == "NaN":
            results[name] = {"outcome": "correct", "seconds": float("nan")}
        if fate == "timeless":
            results[name] = {"outcome": "correct"}
        if fate == "word":
            results[name] = "correct"
    say({"results": results, "number": number})
    if "late" in fates:  # once more, when the next request may have been sent
        time.sleep(fates["late"])
        say({"trying": kernels[0], "number": number})
        worse = {name: {**one, "seconds": 9.0} for name, one in results.items()}
        say({"results": worse, "number": number})
"""


def process(tmp_path: Path, fates: str, **limits: float) -> GpuProcess:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    patient = {"starting": 600.0, "preparing": 600.0, "trying": 600.0}
    return GpuProcess("0", [sys.executable, str(script), fates], **{**patient, **limits})


def batch(problem: Problem, count: int = 4) -> Batch:
    return Batch(problem.operation, problem.shape, problem.space[:count], 0.01, 4)


def fates_of(problem: Problem, **fates: str) -> str:
    import json

    names = {f"k{index}": spec.name[-8:] for index, spec in enumerate(problem.space)}
    return json.dumps({names.get(key, key): fate for key, fate in fates.items()})


def test_what_works_is_reported_with_its_times(tmp_path: Path, listed: list[Problem]) -> None:
    gpu = process(tmp_path, fates_of(listed[0], k1="wrong", k2="launch error"))
    assert gpu.about == About(GPU, 132)
    found = gpu.measure(batch(listed[0]))
    assert [result.outcome for result in found.values()] == [
        *("correct", "wrong", "launch error", "correct")
    ]
    gpu.close()


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(
    ("fate", "outcome", "reason"),
    [
        ("segfault", "illegal", "SIGSEGV"),
        ("exit", "illegal", "exit status 3"),
        ("illegal", "illegal", "an illegal memory access was encountered"),
        ("hang", "timeout", f"no answer for {LIMIT} seconds"),
        ("real-time", "illegal", f"ended with signal {signal.SIGRTMIN + 6}"),
        ("torn", "illegal", "ended with SIGKILL"),
        ("hello", "illegal", "said 'hello"),
        ("[3]", "illegal", "said [3]"),
        ("[" * 5000, "illegal", "said '[[["),
        ('{"results": {}}', "illegal", "said {'results': {}}"),
        ('{"trying": 3}', "illegal", "said {'trying': 3}"),
        ('{"trying": [3]}', "illegal", "said {'trying': [3]}"),  # which no mapping can have
        ("NaN", "launch error", "seconds nan: must be"),
        ("timeless", "launch error", "must have a time"),
        ("word", "launch error", "result 'correct': must be a mapping"),
    ],
    ids=lambda value: value[:20],
)
def test_a_kernel_that_ends_the_process_is_marked_and_the_others_are_measured(
    tmp_path: Path, listed: list[Problem], fate: str, outcome: str, reason: str
) -> None:
    gpu = process(tmp_path, fates_of(listed[0], k1=fate), trying=LIMIT)
    found = gpu.measure(batch(listed[0]))
    outcomes = {spec.name: found[spec].outcome for spec in listed[0].space[:4]}
    assert list(outcomes.values()) == ["correct", outcome, "correct", "correct"]
    assert reason in found[listed[0].space[1]].reason
    assert found[listed[0].space[0]].seconds == 1.0
    again = gpu.measure(batch(listed[0], 1))  # and the process goes on
    assert [result.outcome for result in again.values()] == ["correct"]
    gpu.close()


@pytest.mark.usefixtures("silence")
def test_a_kernel_at_which_the_process_was_killed_is_tried_once_more(
    tmp_path: Path, listed: list[Problem]
) -> None:
    """A host that ran out of memory made a kernel illegal, for this run and all later ones."""
    gpu = process(tmp_path, fates_of(listed[0], k1="killed once"))
    found = gpu.measure(batch(listed[0]))
    assert [one.outcome for one in found.values()] == ["correct"] * 4
    assert (tmp_path / "worker.py.killed").exists()
    gpu.close()


@pytest.mark.parametrize("late", [0, 0.2])
def test_an_answer_that_comes_twice_is_not_that_of_the_next_request(
    tmp_path: Path, listed: list[Problem], late: float
) -> None:
    """Finalists are measured again: the old times were taken for the new ones."""
    gpu = process(tmp_path, f'{{"late": {late}}}')
    for _ in range(3):
        found = gpu.measure(batch(listed[0]))
        assert [(one.outcome, one.seconds) for one in found.values()] == [("correct", 1.0)] * 4
    gpu.close()


@pytest.mark.usefixtures("silence")
def test_two_kernels_that_hang_are_both_marked(tmp_path: Path, listed: list[Problem]) -> None:
    gpu = process(tmp_path, fates_of(listed[0], k0="hang", k3="hang"), trying=LIMIT)
    found = gpu.measure(batch(listed[0]))
    assert [found[spec].outcome for spec in listed[0].space[:4]] == [
        *("timeout", "correct", "correct", "timeout")
    ]
    gpu.close()


def test_a_gpu_on_which_everything_dies_ends_the_run(tmp_path: Path, listed: list[Problem]) -> None:
    fates = {f"k{index}": "segfault" for index in range(20)}
    gpu = process(tmp_path, fates_of(listed[0], **fates))
    with pytest.raises(DeviceError, match=r"ended 6 times.*journal"):
        gpu.measure(batch(listed[0], 12))
    gpu.close()


def test_a_process_that_dies_before_any_kernel_is_not_blamed_on_one(
    tmp_path: Path, listed: list[Problem]
) -> None:
    gpu = process(tmp_path, fates_of(listed[0], preparing="die"))
    with pytest.raises(DeviceError, match="exit status 7"):
        gpu.measure(batch(listed[0]))
    gpu.close()


def test_a_process_that_cannot_start_says_why(tmp_path: Path, listed: list[Problem]) -> None:
    with pytest.raises(DeviceError, match="tuning measures on a GPU"):
        _ = process(tmp_path, '{"error": "tuning measures on a GPU"}').about
    with pytest.raises(DeviceError, match=r"GPU 0: no answer for 0\.3 seconds"):
        _ = process(tmp_path, '{"starting": 3600}', starting=0.3).about
    with pytest.raises(DeviceError, match="GPU 0: its measuring process began with 'Welcome"):
        _ = process(tmp_path, '{"greeting": "Welcome!"}').about


def test_on_a_machine_without_a_gpu_the_real_process_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="no GPU"):
        _ = GpuProcess("", starting=600).about


def test_nobody_waits_for_a_process_to_start_who_asks_nothing_of_it(tmp_path: Path) -> None:
    """Of eight GPUs of a host each would start after the one before."""
    gpu = process(tmp_path, '{"starting": 3600}')
    child = gpu._process
    assert child and child.poll() is None
    gpu.close()
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(DeviceError, match="was ended"):
        _ = gpu.about


def test_closing_ends_a_process_that_hangs(tmp_path: Path, listed: list[Problem]) -> None:
    gpu = process(tmp_path, fates_of(listed[0], k0="sleep"), trying=3600)
    child = gpu._process
    assert child
    with ThreadPoolExecutor(1) as aside:
        measured = aside.submit(gpu.measure, batch(listed[0]))
        until(lambda: measured.done() or (tmp_path / "worker.py.hangs").exists())
        gpu.close()
        assert measured.result(timeout=600) == {}
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_closing_between_two_kernels_leaves_what_was_measured(
    tmp_path: Path, listed: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was just to start again was said to be broken."""
    gpu = process(tmp_path, fates_of(listed[0], k1="segfault"))
    launch = gpu._launch

    def closed() -> None:
        gpu.close()  # in another thread
        launch()

    assert gpu.about == About(GPU, 132)
    monkeypatch.setattr(gpu, "_launch", closed)
    found = gpu.measure(batch(listed[0]))
    assert {spec: one.outcome for spec, one in found.items()} == {listed[0].space[1]: "illegal"}
    assert gpu._process is None


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible(2) == ["3", "GPU-abc"]
    with pytest.raises(DeviceError, match="shows 2"):
        visible(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,3")  # two processes would disturb each other
    with pytest.raises(DeviceError, match="shows 1"):
        visible(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # all are hidden, and GPU 0 was used
    with pytest.raises(DeviceError, match="hides all of them: unset it"):
        visible(1)


STARTED = """
import sys
from warploom.cli import main, tune

def started(*_):
    import warploom.generator.build, warploom.tuning.fleet.gpus, warploom.tuning.gpu
    print("torch is imported" if "torch" in sys.modules else "GPUs start first")
    sys.exit()

tune._engines = started
sys.argv = ["warploom", "tune", "gemm", "--shapes", "1x64x64"]
main()
"""


def test_gpus_start_before_torch_is_imported() -> None:
    """It takes seconds, in the processes that measure too: one after the other is twice as long."""
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True)
    assert done.stdout == "GPUs start first\n", done.stderr
