"""Runs an unchanged training script with compressed communication installed.

    deepspeed --module ds_sparse.run train.py --deepspeed --deepspeed_config ds_config.json

The launcher puts `--local_rank=N` in front of the script's name; it is handed on behind it, where it belongs.
"""

from __future__ import annotations

import os
import runpy
import sys

from . import install

USAGE = "usage: deepspeed --module ds_sparse.run SCRIPT.py [its arguments]"


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The script and the arguments it shall see.

    Raises:
        SystemExit: there is no script among them.
    """
    leading = [a for a in arguments[:1] if a.startswith("--local_rank")]
    rest = arguments[len(leading) :]
    if not rest or rest[0].startswith("-"):
        raise SystemExit(f"{USAGE}\nno script was named, got: {' '.join(arguments) or 'nothing'}")
    return rest[0], rest[1:] + leading


def main() -> None:
    script, arguments = split_arguments(sys.argv[1:])
    install()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as if the script had been started itself
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
