"""A mirror that only writes down what it is told: STANDIN_MIRROR=S takes S seconds to finish, `die` dies at first."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

run, mode = Path(sys.argv[1]), os.environ.get("STANDIN_MIRROR", "0")
told = run / "mirror-told"
if mode == "die" and not told.exists():
    told.touch()
    sys.exit(1)
for line in sys.stdin:
    with told.open("a") as file:
        file.write(line)
    if line.startswith("finish"):
        time.sleep(0 if mode == "die" else float(mode))
        (run / "mirror-done").touch()
        break
