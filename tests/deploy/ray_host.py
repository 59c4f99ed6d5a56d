"""A Ray with few resources, for deployments to join; it ends when stdin is closed.

Usage: ray_host.py NUM_CPUS RESOURCES FOLDER. Prints its address.
"""

import json
import sys

import ray

if __name__ == "__main__":
    context = ray.init(
        address="local",
        num_cpus=int(sys.argv[1]),
        resources=json.loads(sys.argv[2]),
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=sys.argv[3],
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
