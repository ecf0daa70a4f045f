#!/usr/bin/env python3
"""compute-sanitizer for tests: it starts nothing, and says what the environment variable FAKE_SANITIZER asks for.

``clean``: finds what is planted, and nothing else; ``blind``: finds nothing; ``refused``: as on a virtual machine that
hides the device; ``hazard``: also a race in one kernel of ours, more than it prints; ``hang``: never ends an export.
"""

import json
import os
import sys
import time
from fnmatch import fnmatchcase

MODE = os.environ["FAKE_SANITIZER"]
SUMMARY = {"racecheck": "RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"}
REQUIRED = {"memcheck": "write_past_end", "racecheck": "shared_race", "synccheck": "barrier_without_init"}
SAYS = {
    "memcheck": "Invalid __global__ write of size 4 bytes\n=========     at planted_write_past_end+0x60",
    "racecheck": "Error: Race reported between Write access at planted_shared_race+0x90\n"
    "=========     and Read access at planted_shared_race+0xb0 [16 hazards]",
    "synccheck": "Barrier error detected. Missing init.\n=========     at planted_barrier_without_init+0xa0",
}


def option(name: str) -> str:
    """The value of --name=value."""
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def case(name: str, *kernels: str) -> None:
    """What the process writes of a case."""
    print(json.dumps({"begin": name}), flush=True)
    print(json.dumps({"case": name, "kernels": dict.fromkeys(kernels, 1), "seconds": 1.0, "failure": None}))


def is_first() -> bool:
    """Whether no other process has claimed this export: two may look at the same time."""
    try:
        with open(f"{claims}/{export}", "x"):
            return True
    except FileExistsError:
        return False


def say(*lines: str) -> None:
    """Write to the log."""
    with open(option("log-file"), "a", encoding="utf-8") as log:
        log.writelines(f"========= {line}\n" for line in lines)


if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\nCopyright (c) 2020-2025 NVIDIA Corporation\nVersion 2025.3.1.0 (build 1)")
    sys.exit(0)
tool, export = option("tool"), sys.argv[sys.argv.index("--export") + 1]
kernels, claims = (sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("kernels", "claims"))
say("COMPUTE-SANITIZER")
if MODE == "refused":
    say("Error: Device not supported. Please refer to the list of supported devices")
    print(json.dumps({"begin": "planted_none"}))
    print(json.dumps({"case": "planted_none", "kernels": {}, "seconds": 1, "failure": "RuntimeError: CUDA error 999"}))
    sys.exit(1)
errors = 0
if export == "planted":
    case("planted_none", "planted_none")
    case(f"planted_{REQUIRED[tool]}", f"planted_{REQUIRED[tool]}")
    if MODE != "blind":
        say(SAYS[tool], "")
        errors = 1
elif is_first():
    with open(f"{kernels}/{export}/manifest.json", encoding="utf-8") as manifest:
        names = [kernel["name"] for kernel in json.load(manifest)["kernels"]]
    only = [word.partition("=")[2] for word in sys.argv if word.startswith("--only=")]
    names = [name for name in names if not only or any(fnmatchcase(name, pattern) for pattern in only)]
    if MODE == "hang":
        print(json.dumps({"begin": "endless"}), flush=True)
        time.sleep(60)
    case("all", *names)
    if MODE == "hazard" and tool == "racecheck":
        say(f"Error: Race reported between Write access at {names[0]}+0x90")
        say(f"    and Read access at {names[0]}+0xb0 [7 hazards]", "")
        errors = 3
say(SUMMARY.get(tool, "ERROR SUMMARY: {0} errors").format(errors))
