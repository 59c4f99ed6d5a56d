"""A Ray driver of its own process: does on the live deployment's actors what it is told on stdin.

Usage: ray_driver.py ADDRESS NAMESPACE. Each line is a JSON list, a command and its arguments; each
is answered with one line of JSON. Ray would stay half set up in the process of the tests.
"""

import json
import os
import sys

import ray


def has_torch(actor):
    return ray.get(ray.get_actor(actor).has_torch.remote())


def pid(actor):
    return ray.get(ray.get_actor(actor).__ray_call__.remote(lambda self: os.getpid()))


def deaden(pool, *nodes):
    """Let reads of the pool give zeros on these nodes, whatever was written."""

    def inside(actor):
        dead = actor._face.node.runner.pools[pool]
        read = type(dead).layer
        dead.layer = lambda number: read(dead, number).clone().zero_()

    return [ray.get(ray.get_actor(node).__ray_call__.remote(inside)) for node in nodes]


def revive(pool, *nodes):
    """Undo deaden."""

    def inside(actor):
        del actor._face.node.runner.pools[pool].layer

    return [ray.get(ray.get_actor(node).__ray_call__.remote(inside)) for node in nodes]


COMMANDS = {"has_torch": has_torch, "pid": pid, "deaden": deaden, "revive": revive}

if __name__ == "__main__":
    ray.init(sys.argv[1], namespace=sys.argv[2], log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(COMMANDS[command](*arguments)), flush=True)
