"""Commands of a shell in which `warploom` and `python -m` find loaded what they import.

One process has loaded it and forks for each of them. What stands for them in the PATH sends it the
arguments, the folder, the environment and the open files, and ends as the fork ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [asked[:1].encode()], [0, 1, 2])
    server.sendall(asked[1:].encode() + b"\\n")
    sys.exit(int(server.recv(9)))
"""
SERVER = """
import atexit, functools, gc, importlib, json, os, runpy, socket, sys, traceback, weakref

def begin(asked, files):
    (name, *arguments), folder, environment = asked
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if os.path.basename(name) == "warploom":
        sys.argv[:] = [name, *arguments]
        from warploom.cli import main
        main()
    assert arguments[0] == "-m", arguments
    sys.argv[:] = [name, *arguments[2:]]
    sys.path.insert(0, folder)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)

sys.modules["scipy"] = None  # as in tests/conftest.py: transformers imports a third less
address, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
# Each would compile templates, read the package's records, and take torch's operators apart again.
from warploom.generator import configurations, records_file, render, space
for path in configurations.smoke():
    render.render(space.expand_file(path).specs[0])
read, kept = records_file.read, functools.cache(records_file.read)
shipped = {path for path in records_file.every() if path.parent != records_file.folder()}
for path in shipped:
    kept(path)
records_file.read = lambda path: kept(path) if path in shipped else read(path)
for finalizer in [*weakref.finalize._registry]:
    finalizer.atexit = False
gc.freeze()
listening = socket.socket(socket.AF_UNIX)
listening.bind(address)
listening.listen()
print(flush=True)
while True:
    connection = listening.accept()[0]
    if os.fork():
        connection.close()
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        continue
    text, files, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\\n"):
        text += connection.recv(1 << 16)
    program = os.fork()
    if program:
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        connection.sendall(str(status if status >= 0 else 128 - status).encode())
        os._exit(0)
    code = 0
    try:
        begin(json.loads(text), files)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)  # to take all that is loaded apart takes a second
"""
# What commands load: those of Warploom and the benchmarks' programs.
LOADED = (
    "torch",
    "torch._dynamo",  # of tensors on meta, which `explain` makes: more than a second of each
    "warploom.tuning.ahead",
    "transformers.models.llama.modeling_llama",  # several pages patch one
    "benchmarks.runner",
    *map(
        "warploom.cli.{}".format,
        (
            "bench",
            "cache",
            "compile",
            "doctor",
            "emit",
            "explain",
            "list",
            "records",
            "report",
            "schema",
            "show",
            "tune",
        ),
    ),
)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in `folder`, which ends with the first of its commands that fails."""
    path = os.pathsep.join(
        [_stand_ins().name, str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def _stand_ins() -> TemporaryDirectory[str]:
    """A folder with `warploom` and `python`, and the process behind them until this one ends."""
    folder = TemporaryDirectory()
    address = str(Path(folder.name, "address"))
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER, address, *LOADED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
    )
    atexit.register(server.wait)
    atexit.register(server.terminate)
    assert server.stdout and server.stdout.readline() == b"\n"
    for name in ("warploom", "python"):
        stand_in = Path(folder.name, name)
        stand_in.write_text(STAND_IN.format(python=sys.executable, address=address))
        stand_in.chmod(0o755)
    return folder
