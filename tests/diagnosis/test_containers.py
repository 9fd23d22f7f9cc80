"""What container runtimes, Kubernetes and Ray say; the forms of podman are of a real container that was killed here."""

import json
import random

import pytest

from memfit.diagnosis._containers import container_facts, parse_documents, parse_lines, parse_quantity
from memfit.diagnosis._kernel_log import find_kills, read_kernel_lines
from memfit.diagnosis._text import Line

ID = "4522527a65c4" + "0" * 52
MIB, GIB = 1 << 20, 1 << 30
KERNEL = f"""\
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 65536kB, limit 65536kB, failcnt 90
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/libpod_parent/libpod-{ID},task_memcg=/libpod_parent/libpod-{ID},task=python,pid=30295,uid=0
Memory cgroup out of memory: Killed process 30295 (python) total-vm:217308kB, anon-rss:65024kB, file-rss:5844kB
"""


def lines(text):
    return [Line("pod.txt", number, line) for number, line in enumerate(text.split("\n"), 1)]


def inspected(*, killed, code, podman=False, running=False):
    state = {"Status": "exited", "Running": running, "OOMKilled": killed, "ExitCode": code, "Error": ""}
    more = {"OciVersion": "1.0.2-dev"} if podman else {}
    return json.dumps(
        [{"Id": ID, "Name": "/train", "State": more | state, "HostConfig": {"Memory": 64 * MIB}}], indent=4
    )


def kinds(ends, kills=()):
    return [fact.kind for fact in container_facts(ends, kills)]


def test_the_flag_of_docker_proves_the_containers_own_limit():
    text = inspected(killed=True, code=137)
    end = parse_documents(text, "i.json")[0]
    assert (end.who, end.name, end.id, end.exit_code, end.limit_bytes) == ("Docker", "train", ID, 137, 64 * MIB)
    assert kinds([end]) == ["cgroup_kill"]
    assert '"OOMKilled": true' in text.splitlines()[end.line.number - 1]


def test_a_flag_that_is_false_rules_nothing_out_and_the_kernels_log_decides():
    """podman 4.3 on cgroup v1 writes false beside 137 for a kill at the container's own limit."""
    ends = parse_documents(inspected(killed=False, code=137, podman=True))
    assert ends[0].who == "podman"
    assert kinds(ends) == ["sigkill"]
    kills = find_kills(read_kernel_lines(KERNEL))
    fact = container_facts(ends, kills)[0]
    assert fact.kind == "cgroup_kill"
    assert "Killed process 30295" in fact.lines[1].text
    other = find_kills(read_kernel_lines(KERNEL.replace("4522527a65c4", "ffffffffffff")))
    assert kinds(ends, other) == ["sigkill"]


def test_a_container_that_runs_or_ended_well_is_no_death():
    assert kinds(parse_documents(inspected(killed=False, code=0, running=True))) == []
    assert kinds(parse_documents(inspected(killed=False, code=0))) == ["success"]
    assert kinds(parse_documents(inspected(killed=False, code=1))) == []


def test_events_of_docker_in_text_and_json_name_the_container():
    text = (
        f"2024-05-01T10:00:00.000000000Z container oom {ID} (image=x, name=train)\n"
        f"2024-05-01T10:00:01.000000000Z container die {ID} (execDuration=9, exitCode=137, image=x, name=train)\n"
        "2024-05-01T10:00:02Z network disconnect abc (container=oom)\n"
    )
    found = parse_lines(lines(text))
    assert [(end.name, end.oom_killed, end.exit_code) for end in found] == [("train", True, None), ("train", None, 137)]
    documents = "\n".join(
        json.dumps(
            {
                "status": verb,
                "id": ID,
                "Type": "container",
                "Action": verb,
                "Actor": {"ID": ID, "Attributes": {"name": "train", **more}},
            }
        )
        for verb, more in (("oom", {}), ("die", {"exitCode": "137"}), ("start", {}))
    )
    assert [(end.oom_killed, end.exit_code, end.line.number) for end in parse_documents(documents)] == [
        (True, None, 1),
        (None, 137, 2),
    ]


def test_events_of_podman_say_died_and_no_more():
    text = f"2026-11-21 21:22:56.9721809 +0000 UTC container died {ID} (image=localhost/x:1, name=train)"
    end = parse_lines(lines(text))[0]
    assert (end.who, end.id, end.oom_killed) == ("podman", ID, None)
    assert kinds([end]) == []


DESCRIBED = """\
Name:             trainer-0
Namespace:        ml
Status:           Running
Containers:
  trainer:
    Container ID:  containerd://abc
    State:          Running
      Started:      Sat, 17 May 2025 09:46:04 +0300
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    1
      Started:      Sat, 17 May 2025 09:04:36 +0300
    Ready:          True
    Restart Count:  65
    Limits:
      cpu:     25m
      memory:  25Mi
    Requests:
      memory:  10Mi
  sidecar:
    State:          Terminated
      Reason:       Completed
      Exit Code:    0
    Restart Count:  0
    Limits:
      memory:  1Gi
"""


def test_a_pod_that_runs_again_tells_its_last_death_even_with_code_1():
    ends = parse_lines(lines(DESCRIBED))
    first = ends[0]
    assert (first.name, first.reason, first.exit_code, first.limit_bytes, first.restarts) == (
        "trainer-0/trainer",
        "OOMKilled",
        1,
        25 * MIB,
        65,
    )
    assert first.line.number == 10
    assert (ends[1].name, ends[1].reason, ends[1].limit_bytes) == ("trainer-0/sidecar", "Completed", GIB)
    assert kinds(ends) == ["cgroup_kill"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi. Container trainer was using 9Ki",
            "global_kill",
        ),
        ("The node was low on resource: ephemeral-storage.", "disk_full"),
    ],
)
def test_an_eviction_is_of_the_node_and_not_always_for_memory(message, kind):
    text = f"Name: trainer-0\nStatus: Failed\nReason:  Evicted\nMessage: {message}\n"
    assert kinds(parse_lines(lines(text))) == [kind]
    document = {
        "kind": "Pod",
        "metadata": {"name": "trainer-0"},
        "status": {"phase": "Failed", "reason": "Evicted", "message": message},
    }
    assert kinds(parse_documents(json.dumps(document))) == [kind]
    event = f"  Warning  Evicted  3m  kubelet  {message}"
    assert kinds(parse_lines(lines(event))) == [kind]


def test_a_pods_document_has_the_limit_beside_the_reason():
    document = {
        "items": [
            {
                "kind": "Pod",
                "metadata": {"name": "trainer-0"},
                "spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "2Gi"}}}]},
                "status": {
                    "containerStatuses": [
                        {
                            "name": "trainer",
                            "restartCount": 3,
                            "containerID": f"containerd://{ID}",
                            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                            "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                        }
                    ]
                },
            }
        ]
    }
    text = json.dumps(document, indent=2)
    end = parse_documents(text)[0]
    assert (end.name, end.id, end.limit_bytes, end.restarts) == ("trainer-0/trainer", ID, 2 * GIB, 3)
    assert "OOMKilled" in text.splitlines()[end.line.number - 1]
    assert kinds([end]) == ["cgroup_kill"]


def test_rows_of_kubectl_get_pods_are_read():
    text = "NAME   READY   STATUS   RESTARTS   AGE\na-1   0/1   OOMKilled   1   10s\nb-1   1/1   Running   0   1d\nc-1   0/1   Evicted   0   1d\n"
    assert [(end.name, end.reason) for end in parse_lines(lines(text))] == [("a-1", "OOMKilled"), ("c-1", "Evicted")]
    assert kinds(parse_lines(lines(text))) == ["cgroup_kill"]  # why the other was evicted is not told


def test_quantities_of_kubernetes_have_two_kinds_of_units():
    assert [parse_quantity(text) for text in ("1Gi", "1G", "128974848", "2000m", "")] == [
        GIB,
        10**9,
        128974848,
        2,
        None,
    ]


def test_what_is_none_of_these_gives_nothing():
    assert parse_documents("") == parse_documents("[1, null]") == parse_documents("{broken") == []
    assert parse_lines(lines("OOMKilled is a word\nThe bedroom: \n")) == []


def test_torn_text_is_never_a_fault():
    chance = random.Random(1)
    for text in (DESCRIBED, KERNEL, inspected(killed=True, code=137)):
        for _ in range(60):
            torn = list(text)
            for _ in range(30):
                torn[chance.randrange(len(torn))] = chance.choice("0123456789|:,.{}[]=\n MG")
            ends = [*parse_lines(lines("".join(torn))), *parse_documents("".join(torn))]
            container_facts(ends, find_kills(read_kernel_lines("".join(torn))))
