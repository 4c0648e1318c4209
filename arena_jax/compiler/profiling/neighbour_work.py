"""Work for the cores beside the ones that a piece is timed on; a script, which must import quickly.

    python neighbour_work.py CORE

Says so when it begins, and ends with the process that started it. Products that stay in a core's own caches and a pass
over more than these hold take turns, as in a layer.
"""

import os
import sys

import numpy as np


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    parent = os.getppid()
    matrix, values = np.ones((256, 256), np.float32), np.ones(1 << 20, np.float32)
    out = np.empty_like(values)
    sys.stdout.write("\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        for _ in range(4):
            matrix @ matrix
        np.tanh(values, out=out)


if __name__ == "__main__":
    main()
