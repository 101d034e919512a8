"""The ready files for Slurm and Kubernetes, run on this machine by stand-ins for the schedulers."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launch.started import Job, free_port, loopback_addresses

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
POD = ROOT / "launch" / "kubernetes" / "job.yaml"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

#: Writes its place, and waits for the other rank and, with --wait, for a file; without torch, since
#: only the schedulers' files are tested.
SCRIPT = """
import json, os, sys, time
rank = os.environ["RANK"]
names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
place = {name: os.environ[name] for name in names}
with open(f"rank{rank}.part", "w") as file:
    json.dump([place, sys.argv[1:]], file)
os.rename(f"rank{rank}.part", f"rank{rank}.json")
while not os.path.exists("rank0.json") or not os.path.exists("rank1.json"):
    time.sleep(0.05)
while "--wait" in sys.argv and not os.path.exists("stop"):
    time.sleep(0.05)
print("rank", rank, "is done")
"""

#: Starts each task of a step on an "own node" of the loopback, as srun does with one task a node.
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


def with_commands(job, **scripts):
    """Return a PATH on which these Python programs come before all others."""
    folder = job.path / "bin"
    folder.mkdir()
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    # torchrun is in the folder of Python, which an activated environment has on its PATH.
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def places_of(job):
    return {rank: json.loads((job.path / f"rank{rank}.json").read_text()) for rank in (0, 1)}


def have_started(job):
    return all((job.path / f"rank{rank}.json").exists() for rank in (0, 1))


# -- Slurm ---------------------------------------------------------------------------------------


def sbatch(job, *words, srun=SRUN):
    """Run the batch script as Slurm does on the first of two nodes."""
    job.write("train.py", SCRIPT)
    path = with_commands(job, srun=srun, scontrol=SCONTROL)
    slurm = {
        "PATH": path,
        "SLURM_JOB_ID": str(free_port()),  # the port is derived from it
        "SLURM_JOB_NAME": "procpipe",
        "SLURM_JOB_NODELIST": ",".join(host.address for host in loopback_addresses(2)),
        "SLURM_NNODES": "2",
    }
    return job.start(["bash", SBATCH, *words], **slurm), slurm


def test_slurm_starts_one_torchrun_a_node_and_queues_again_before_the_time_limit():
    with Job() as job:
        batch, slurm = sbatch(job, "train.py", "--wait", "two words")
        batch.wait_until(lambda: have_started(job))
        batch.popen.send_signal(signal.SIGUSR1)  # as by --signal=B:USR1@120
        batch.wait_until(lambda: "time limit is near: queued again" in batch.output)
        batch.wait_until((job.path / "scontrol.log").exists)
        assert batch.popen.poll() is None  # the job runs until Slurm ends it
        job.write("stop", "")
        assert batch.wait_end() == 0, batch.output

        for rank, (place, words) in places_of(job).items():
            assert words == ["--wait", "two words"]
            assert place["MASTER_ADDR"] in slurm["SLURM_JOB_NODELIST"].split(",")
            del place["MASTER_ADDR"]
            assert place == {
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "TORCHELASTIC_RUN_ID": slurm["SLURM_JOB_ID"],
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
            assert f"rank {rank} is done" in batch.output
        assert (job.path / "scontrol.log").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
        logs = job.path / f"procpipe-{slurm['SLURM_JOB_ID']}"
        assert len(list(logs.rglob("stdout.log"))) == 2
        assert not job.survivors()


def test_the_batch_script_ends_with_the_exit_code_of_a_failure():
    with Job() as job:
        batch, _ = sbatch(job, "train.py", srun="raise SystemExit(3)")

        assert batch.wait_end() == 3


# -- Kubernetes ----------------------------------------------------------------------------------


def documents():
    """Return the service and the job of the file."""
    yaml = pytest.importorskip("yaml")
    return [*yaml.safe_load_all(POD.read_text())]


def test_pods_can_find_pod_0():
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]

    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment(pod)["RDZV_HOST"] == f"{name}-0.{pod['subdomain']}"


def environment(pod):
    (container,) = pod["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_kubernetes_command_starts_a_torchrun_a_pod():
    _, spec = documents()
    pod = spec["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [v["name"] for v in container["env"] if "value" not in v] == ["POD_IP"]
    hosts = loopback_addresses(2)
    with Job() as job:
        job.write("train.py", SCRIPT)
        variables = environment(pod) | {
            "PATH": with_commands(job),
            "NPROC": "1",
            "RDZV_HOST": hosts[0].address,
            "RDZV_PORT": str(free_port()),
        }
        pods = [
            job.start(
                [*container["command"], *container["args"]],
                host,
                **variables | {"POD_IP": host.address, "JOB_COMPLETION_INDEX": str(index)},
            )
            for index, host in enumerate(hosts)
        ]
        for agent in pods:
            assert agent.wait_end() == 0, agent.output

        for place, words in places_of(job).values():
            assert words == ["--epochs", "10"]
            assert place["WORLD_SIZE"] == "2"
            assert place["TORCHELASTIC_RUN_ID"] == "procpipe-train"
            assert place["TORCHELASTIC_MAX_RESTARTS"] == "3"
            assert place["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert not job.survivors()


# -- all -----------------------------------------------------------------------------------------


def test_files_are_installed_with_the_launcher():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["procpipe.launch"]

    files = [file for pattern in patterns for file in (ROOT / "launch").glob(pattern)]
    assert {SBATCH, POD} <= set(files)
