"""What Kubernetes says of a pod: how its containers ended, at which limit, and why it was evicted."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from memfit.diagnosis import diagnose, list_remedies

GIB = 1 << 30
END = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-03-01T12:44:10Z", "containerID": "containerd://ab"}


def pod(end=END, *, limit="32Gi", now=None, **status):
    """A pod of two containers, of which the second one ended."""
    own = {"name": "trainer", "restartCount": 3, "lastState": {"terminated": end} if end else {}, "state": now or {}}
    other = {"name": "sidecar", "restartCount": 0, "lastState": {}, "state": {"running": {"startedAt": "2026-03-01"}}}
    limits = {"limits": {"memory": limit, "nvidia.com/gpu": "1"}} if limit else {}
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}, {"name": "tmp", "emptyDir": {}}]
    containers = [{"name": "sidecar", "resources": {}}, {"name": "trainer", "resources": limits}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "job-x7"},
        "spec": {"nodeName": "gpu-7", "containers": containers, "volumes": volumes},
        "status": {"phase": "Running", "containerStatuses": [other, own], **status},
    }


@pytest.fixture
def told(tmp_path):
    def of(text, name="pod.txt"):
        path = Path(tmp_path, name)
        path.write_text(text)
        return diagnose(path)

    return of


def as_yaml(found, tmp_path):
    with open(tmp_path / "dump", "w") as file:
        YAML().dump(found, file)
    return (tmp_path / "dump").read_text()


def test_each_way_to_print_a_pod_names_the_container_its_limit_and_its_end(told, tmp_path):
    ways = [json.dumps(pod(), indent=4), json.dumps(pod()), as_yaml(pod(), tmp_path)]
    ways.append(json.dumps({"kind": "List", "items": [pod(None), pod()]}, indent=2))
    ways.append(json.dumps(pod(None, now={"terminated": END})))  # restartPolicy: Never keeps the end as the state
    for text in ways:
        found = told(text)
        assert (found.kind, found.cause, found.confidence) == ("host_cgroup", "out_of_memory", "proved")
        assert (found.where["node"], found.figures["limit"]) == ("gpu-7", 32 * GIB)
        (line,) = found.evidence
        assert line.text.startswith("container trainer of pod job-x7: OOMKilled, exit code 137, finished ")
        assert line.text.endswith("3 restarts, limit 32.00 GiB of the container")
        assert "OOMKilled" in text.splitlines()[line.line - 1]
        first = list_remedies(found)[0]
        assert (first.title, first.setting) == ("give the container 48Gi", "resources.limits.memory: 48Gi")
        assert "32.00 GiB of the container + 50%" in first.reason


@pytest.mark.parametrize(
    ("end", "kind", "cause"),
    [
        (END | {"exitCode": 0}, "host_cgroup", "out_of_memory"),  # a child was killed, and its parent ended well
        (END | {"reason": "Error"}, "none", "killed"),
        (END | {"reason": "Completed", "exitCode": 0}, "none", "unknown"),
        (None, "none", "unknown"),
    ],
)
def test_a_reason_counts_more_than_an_exit_code(told, end, kind, cause):
    found = told(json.dumps(pod(end, limit="")))
    assert (found.kind, found.cause) == (kind, cause)
    assert "limit" not in found.figures


@pytest.mark.parametrize(
    ("message", "kind", "cause"),
    [
        ("The node was low on resource: memory. Container trainer was using 30Gi.", "host_kernel", "out_of_memory"),
        ("The node had condition: [MemoryPressure]. ", "host_kernel", "out_of_memory"),
        ('Usage of EmptyDir volume "shm" exceeds the limit "1Gi". ', "shm", "out_of_memory"),
        ('Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ', "none", "disk_full"),
        ("The node was low on resource: ephemeral-storage. Container trainer was using 34260Ki.", "none", "disk_full"),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ", "none", "disk_full"),
        ("The node had condition: [DiskPressure]. ", "none", "disk_full"),
    ],
)
def test_an_eviction_is_of_the_nodes_memory_of_a_volume_in_memory_or_of_a_disk(told, message, kind, cause):
    found = told(json.dumps(pod(None, phase="Failed", reason="Evicted", message=message)))
    assert (found.kind, found.cause) == (kind, cause)
    assert message.strip() in found.evidence[0].text and "pod job-x7: Evicted" in found.evidence[0].text


@pytest.mark.parametrize(
    ("said", "kind"),
    [("Last State: Terminated\n  Reason: OOMKilled\n  Exit Code: 137", "host_cgroup"),
     ("Reason: Evicted\nMessage: The node was low on resource: memory. ", "host_kernel")],
)  # fmt: skip
def test_what_kubectl_describes_is_read_as_a_log(told, said, kind):
    assert told(f"Name: job-x7\nNamespace: ml\nContainers:\n  trainer:\n    {said}\n").kind == kind


def test_a_pod_beside_a_log_says_what_the_log_cannot(tmp_path):
    (tmp_path / "pod.json").write_text(json.dumps(pod()))
    (tmp_path / "train.log").write_text("epoch 1\nepoch 2\n")
    found = diagnose([tmp_path / "train.log", tmp_path / "pod.json"])
    assert (found.kind, found.where["node"]) == ("host_cgroup", "gpu-7")


@pytest.mark.parametrize("text", ['{"containerStatuses": ', "containerStatuses: [", "a: containerStatuses", "[1, 2]"])
def test_what_is_no_whole_pod_is_read_as_a_log(told, text):
    assert told(text + "\nOOMKilled\n").kind == "host_cgroup"
