"""Prints, as a script started by `colossalai run`, how its world looks, then draws a progress bar."""

import json
import multiprocessing
import os
import pickle
import sys


class Thing:
    size: int


def in_child(queue: multiprocessing.SimpleQueue) -> None:
    queue.put(type(pickle.loads(pickle.dumps(Thing()))).__module__)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    facts = {
        "argv": sys.argv,
        "file": __file__,
        "path0": sys.path[0],
        "annotation": str(Thing.__annotations__["size"]),
        "thing": type(pickle.loads(pickle.dumps(Thing()))).__module__,
        "child": queue.get(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "ours": sorted(name for name in os.environ if name.startswith("COLOSSALAI_FAIL")),
        "world": os.environ["WORLD_SIZE"],
    }
    child.join()
    print(json.dumps(facts))
    for step in range(3):
        sys.stderr.write(f"\r{step + 1}/3")
