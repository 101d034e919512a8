"""The ready files for Slurm and Kubernetes, run by stand-ins for the schedulers and for torchrun.

Each notes the words that torchrun gets, which torchrun's own parser reads. That a job of these
options trains on several hosts: tests/launch/run/test_hosts.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.dist.jobs import job_environment
from tests.held import happens

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
POD = ROOT / "launch" / "kubernetes" / "job.yaml"

pytestmark = pytest.mark.dist

NODES = ["127.0.0.2", "127.0.0.3"]
TIMEOUT_S = 60.0

#: Runs until there is a file if the script has the argument --wait.
TORCHRUN = """
import json, os, sys, time
assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
node = os.environ.get("SLURM_NODEID") or os.environ["JOB_COMPLETION_INDEX"]
with open(f"node{node}.part", "w") as file:
    json.dump(sys.argv[1:], file)
os.rename(f"node{node}.part", f"node{node}.json")
while "--wait" in sys.argv and not os.path.exists("stop"):
    time.sleep(0.01)
"""

#: Starts each task of a step on an "own node", as srun does with one task a node.
SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = []
for node, name in enumerate(os.environ["SLURM_JOB_NODELIST"].split(",")):
    own = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURMD_NODENAME": name}
    tasks.append(subprocess.Popen(words, env=os.environ | own))
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(*sys.argv[3].split(","), sep="\\n")
else:
    with open("scontrol.log", "a") as file:
        print(*sys.argv[1:], file=file)
"""


def environment_with(folder, **scripts):
    """Return an environment on whose PATH these Python programs come before all others."""
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        path = folder / "bin" / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    env = job_environment({"PATH": path})
    return {key: value for key, value in env.items() if not key.startswith("SLURM_")}


def given_to_torchrun(folder, node):
    """Return what torchrun reads in the words that it was given on a node."""
    words = json.loads((folder / f"node{node}.json").read_text())
    return vars(get_args_parser().parse_args(words))


# -- Slurm ---------------------------------------------------------------------------------------


def sbatch(folder, *words, srun=SRUN):
    """Start the batch script as Slurm does on the first of two nodes."""
    env = environment_with(folder, srun=srun, scontrol=SCONTROL, torchrun=TORCHRUN)
    env |= {"SLURM_JOB_ID": "20007", "SLURM_JOB_NAME": "procpipe", "SLURM_NNODES": "2"}
    env["SLURM_JOB_NODELIST"] = ",".join(NODES)
    return subprocess.Popen(
        ["bash", SBATCH, *words], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    )


def test_slurm_starts_one_torchrun_a_node_and_queues_again_before_the_time_limit(tmp_path):
    batch = sbatch(tmp_path, "train.py", "--wait", "two words")
    try:
        for node in range(2):
            assert happens((tmp_path / f"node{node}.json").exists, TIMEOUT_S)
        batch.send_signal(signal.SIGUSR1)  # as by --signal=B:USR1@120
        assert happens((tmp_path / "scontrol.log").exists, TIMEOUT_S)
        assert batch.poll() is None  # the job runs until Slurm ends it
    finally:
        (tmp_path / "stop").touch()
    output, _ = batch.communicate(timeout=TIMEOUT_S)

    assert batch.returncode == 0
    assert output == "time limit is near: queued again\n"
    assert (tmp_path / "scontrol.log").read_text() == "requeue 20007\n"
    for node, address in enumerate(NODES):
        expected = {
            "nnodes": "2",
            "nproc_per_node": "1",
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{NODES[0]}:10007",
            "rdzv_id": "20007",
            "rdzv_conf": f"is_host={int(node == 0)}",
            "local_addr": address,
            "max_restarts": 0,
            "log_dir": str(tmp_path / "procpipe-20007"),
            "training_script": "train.py",
            "training_script_args": ["--wait", "two words"],
        }
        assert expected.items() <= given_to_torchrun(tmp_path, node).items()


def test_the_batch_script_ends_with_the_exit_code_of_a_failure(tmp_path):
    batch = sbatch(tmp_path, "train.py", srun="raise SystemExit(3)")
    batch.communicate(timeout=TIMEOUT_S)

    assert batch.returncode == 3


# -- Kubernetes ----------------------------------------------------------------------------------


def test_a_torchrun_is_started_in_each_pod_and_pods_can_find_pod_0(tmp_path):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(POD.read_text())
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}

    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["RDZV_HOST"] == f"{name}-0.{pod['subdomain']}"
    assert [name for name, value in variables.items() if value is None] == ["POD_IP"]

    env = environment_with(tmp_path, torchrun=TORCHRUN) | variables | {"RDZV_HOST": NODES[0]}
    for node, address in enumerate(NODES):
        subprocess.run(
            [*container["command"], *container["args"]],
            cwd=tmp_path,
            env=env | {"POD_IP": address, "JOB_COMPLETION_INDEX": str(node)},
            timeout=TIMEOUT_S,
            check=True,
        )
        expected = {
            "nnodes": "2",
            "nproc_per_node": "8",
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{NODES[0]}:29400",
            "rdzv_id": "procpipe-train",
            "rdzv_conf": f"is_host={int(node == 0)}",
            "local_addr": address,
            "max_restarts": 3,
            "training_script": "train.py",
            "training_script_args": ["--epochs", "10"],
        }
        assert expected.items() <= given_to_torchrun(tmp_path, node).items()


# -- all -----------------------------------------------------------------------------------------


def test_files_are_installed_with_the_launcher():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["procpipe.launch"]

    files = [file for pattern in patterns for file in (ROOT / "launch").glob(pattern)]
    assert {SBATCH, POD} <= set(files)
