"""LLM in whole programs: scripts without a main guard, ``python -c``, stdin, threads, ctrl-C, kills, several LLMs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil

from drumline.errors import ExitCode

from .conftest import SMALL

TIMEOUT_S = 100
HEAD = "import json, os, signal, sys, threading\nfrom drumline import LLM, SamplingParams\n"


def program(model_path: Path, text: str) -> str:
    # No main guard: a start method that runs the program again would never come to an end.
    options = f"MODEL, SMALL = {str(model_path)!r}, {SMALL!r}\n"
    greedy = "GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)\n"
    return HEAD + options + greedy + textwrap.dedent(text)


def run(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def last_json(found: subprocess.CompletedProcess[str]) -> Any:
    assert found.stdout.strip(), found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def wait_gone(pids: list[int], limit_s: float = 5.0) -> None:
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs([p for p in alive if p.status() != psutil.STATUS_ZOMBIE], timeout=limit_s)
    assert not left, left


def test_script_with_two_sizes_at_once_in_threads(model_path: Path, tmp_path: Path) -> None:
    """Both alive together, one made in a thread that ends, one never closed; a forked child does no harm."""
    script = tmp_path / "script.py"
    script.write_text(
        program(
            model_path,
            """
            made, failed = {}, []

            def make(tp):
                try:
                    made[tp] = LLM(MODEL, tensor_parallel_size=tp, **SMALL)
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=make, args=(tp,)) for tp in (1, 2)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            if failed: raise failed[0]
            tokens = {}

            def use(tp):
                tokens[tp] = made[tp].generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

            threads = [threading.Thread(target=use, args=(tp,)) for tp in (1, 2, 1)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            pids = {tp: [p.pid for p in made[tp].processes()[1:]] for tp in (1, 2)}
            del made[1]  # collected: its processes end
            if os.fork() == 0:
                try:
                    made[2].generate([5], GREEDY)
                except RuntimeError as error:
                    sys.exit(7 if "forked" in str(error) else 1)
            child = os.waitstatus_to_exitcode(os.wait()[1])
            use(2)
            print(json.dumps({"tokens": tokens, "pids": pids, "child": child,
                              "alive": [os.path.exists(f"/proc/{pid}") for pid in pids[1]]}))
            """,
        )
    )
    found = run([sys.executable, "-W", "ignore::DeprecationWarning", str(script)])
    assert found.returncode == 0, found.stderr
    answer = last_json(found)
    assert answer["tokens"]["1"] == answer["tokens"]["2"]
    assert len(answer["tokens"]["1"]) == 12
    assert answer["child"] == 7
    assert not any(answer["alive"])
    assert [len(answer["pids"][tp]) for tp in ("1", "2")] == [2, 4]
    wait_gone(answer["pids"]["2"])


def test_stdin_ctrl_c_and_the_programs_death(model_path: Path) -> None:
    """ctrl-C in generate leaves the LLM usable; when the program is killed nothing stays."""
    text = program(
        model_path,
        """
        llm = LLM(MODEL, **SMALL)
        long = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)

        class Bar:  # the first prompt is done: the engine is in the middle of the others
            def __init__(self, **_): pass
            def close(self): pass
            def update(self, n): threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()

        interrupted = False
        try:
            llm.generate([[5], [6], [7]], [SamplingParams(max_tokens=1), long, long], use_tqdm=Bar)
        except KeyboardInterrupt:
            interrupted = True
        tokens = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        print(json.dumps({"interrupted": interrupted, "tokens": tokens, "pids": [p.pid for p in llm.processes()[1:]]}))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    found = run([sys.executable, "-"], text)
    assert found.returncode == -signal.SIGKILL, found.stderr
    answer = last_json(found)
    assert answer["interrupted"]
    assert len(answer["tokens"]) == 12
    wait_gone(answer["pids"])


def test_command_line_and_the_death_of_a_process(model_path: Path) -> None:
    """One exception that names who died and how; then the LLM refuses, and the program ends as it likes."""
    victim = "Worker_TP1"
    text = program(
        model_path,
        f"""
        import time
        from drumline.errors import EngineDeadError
        llm = LLM(MODEL, tensor_parallel_size=2, recovery="off", **SMALL)
        pids = {{p.name: p.pid for p in llm.processes()}}

        class Bar:
            def __init__(self, **_): pass
            def close(self): pass
            def update(self, n):
                self.__class__.killed = time.monotonic()
                os.kill(pids[{victim!r}], signal.SIGKILL)

        said = []
        long = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
        for _ in range(2):
            try:
                llm.generate([[5], [6]], [SamplingParams(max_tokens=1), long], use_tqdm=Bar)
            except EngineDeadError as error:
                said.append(str(error))
                code = error.exit_code
        waited = time.monotonic() - Bar.killed
        print(json.dumps({{"said": said, "waited": waited, "pids": list(pids.values())[1:]}}))
        sys.exit(code)
        """,
    )
    found = run([sys.executable, "-c", text])
    assert found.returncode == ExitCode.WORKER_DIED, found.stderr
    answer = last_json(found)
    assert len(answer["said"]) == 2
    assert all(victim in said and "SIGKILL" in said for said in answer["said"])
    assert answer["waited"] < 2
    wait_gone(answer["pids"])


def test_a_start_that_fails(model_path: Path) -> None:
    """What cannot work and what did not are told apart, by the exceptions and by the exit codes they stand for."""
    text = program(
        model_path,
        """
        from drumline import errors
        codes = []
        for options in ({"tensor_parallel_size": 100}, {"worker_cls": "tests.server.odd_workers:Broken"}):
            try:
                LLM(MODEL, **SMALL, **options)
            except (errors.ConfigError, errors.StartupError) as error:
                codes.append((int(error.exit_code), str(error)))
        print(json.dumps(codes))
        """,
    )
    found = run([sys.executable, "-c", text])
    assert found.returncode == 0, found.stderr
    (usage, _), (failed, said) = last_json(found)
    assert (usage, failed) == (ExitCode.USAGE, ExitCode.START_FAILED)
    assert "no such device here" in said


def test_ctrl_c_during_the_start(model_path: Path) -> None:
    text = program(
        model_path,
        """
        print("go", flush=True)
        try:
            LLM(MODEL, tensor_parallel_size=2, **SMALL)
        except KeyboardInterrupt:
            sys.exit(5)
        """,
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "go\n"
        root = psutil.Process(running.pid)
        deadline = time.monotonic() + TIMEOUT_S
        while not (children := root.children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.02)  # a child of a child makes no event that this process could wait for
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 5, stderr
    wait_gone([child.pid for child in children])


def test_other_children_of_the_program_are_left_alone(model_path: Path) -> None:
    """Through a life, a death and an end: they go on, and their exit codes are the program's to collect."""
    text = program(
        model_path,
        """
        import subprocess
        from drumline.errors import EngineDeadError
        start = lambda: subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(sys.stdin.read(1) == 'x')"],
                                         stdin=subprocess.PIPE, text=True)
        before = start()
        llm = LLM(MODEL, tensor_parallel_size=2, recovery="off", **SMALL)
        between = start()
        if os.fork() == 0:
            signal.pause()
        forked = max(int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split())
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        pids = [p.pid for p in llm.processes()[1:]]
        os.kill(pids[-1], signal.SIGKILL)
        try:
            llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        except EngineDeadError:
            pass
        llm.close()
        alive = [child.poll() is None for child in (before, between)] + [os.waitpid(forked, os.WNOHANG) == (0, 0)]
        before.communicate("x")
        between.communicate("y")
        os.kill(forked, signal.SIGTERM)
        codes = [before.returncode, between.returncode, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]
        print(json.dumps({"alive": alive, "codes": codes, "pids": pids}))
        """,
    )
    found = run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", text])
    assert found.returncode == 0, found.stderr
    answer = last_json(found)
    assert answer["alive"] == [True, True, True]
    assert answer["codes"] == [1, 0, -signal.SIGTERM]
    wait_gone(answer["pids"])


def test_importing_costs_nothing() -> None:
    code = "import sys, drumline; sys.exit(' '.join({'torch', 'zmq', 'tokenizers'} & set(sys.modules)) or 0)"
    assert run([sys.executable, "-c", code]).returncode == 0
