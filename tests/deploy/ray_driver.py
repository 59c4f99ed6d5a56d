"""A Ray driver of its own process: does on the live deployment's actors what it is told on stdin.

Usage: ray_driver.py ADDRESS NAMESPACE. Each line is a JSON list, a command and its arguments; each
is answered with one line of JSON. Ray would stay half set up in the process of the tests.
"""

import json
import os
import sys

import ray


def has_torch(actor):
    return ray.get(ray.get_actor(actor).__ray_call__.remote(lambda self: "torch" in sys.modules))


def pid(actor):
    return ray.get(ray.get_actor(actor).__ray_call__.remote(lambda self: os.getpid()))


def routers():
    """Names of the router actors that live."""
    return [name for name in ray.util.list_named_actors() if name.startswith("router-")]


def tell_late(router):
    """Tell a router of no nodes, as a message that comes after all others."""
    ray.get(ray.get_actor(router).set_nodes.remote(0, [], [], []))


def deaden(pool, *nodes):
    """Let reads of the pool give zeros on these nodes, whatever was written."""

    def inside(dead):
        read = type(dead).layer
        dead.layer = lambda number: read(dead, number).clone().zero_()

    change(pool, nodes, inside)


def revive(pool, *nodes):
    """Undo deaden."""

    def inside(dead):
        del dead.layer

    change(pool, nodes, inside)


def change(pool, nodes, inside):
    """Change a pool between two steps; recorded steps go on with what they were recorded on."""

    def in_loop(actor):
        node = actor._face.node

        def between_steps():
            inside(node.runner.pools[pool])
            node.runner.decode_steps._recorded.clear()

        node._loop.call(between_steps).result(60)

    ray.get([ray.get_actor(node).__ray_call__.remote(in_loop) for node in nodes])


COMMANDS = {
    "has_torch": has_torch,
    "pid": pid,
    "routers": routers,
    "tell_late": tell_late,
    "deaden": deaden,
    "revive": revive,
}

if __name__ == "__main__":
    ray.init(sys.argv[1], namespace=sys.argv[2], log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(COMMANDS[command](*arguments)), flush=True)
