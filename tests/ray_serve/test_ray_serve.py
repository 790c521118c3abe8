"""Replicas on a local Ray: conversations that return, and a replica that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("fastapi")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import ray
from ray import serve
from replicas import Loader
from talk import CONVERSATIONS, TURNS, cached_of, play
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.cli import run
from kvcore.errors import InputError
from kvcore.integrations.ray_serve import RaySettings, app, build

BUDGET = 30_000_000  # bytes: the prefixes of about half of the conversations


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 32, "hidden": 64, "intermediate": 128}
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), **shape)
    return write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Ray and its HTTP proxy on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), str(HERE.parent)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": variables},
        logging_level="ERROR",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def chat(url: str, messages: list[dict[str, str]], **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": 2, "temperature": 0} | more
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=300)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_conversations_that_return_reuse_twice_as_much_as_at_random(url: str, model: Path, tmp_path: Path) -> None:
    found = {}
    for routing in ("prefix", "replicas:RandomRouter"):
        serve.run(build(Loader(str(model), str(tmp_path), BUDGET), RaySettings(replicas=2, routing=routing)))
        found[routing] = play(lambda messages: cached_of(json.load(chat(url, messages))))
        serve.delete("default")
    prefix, at_random = found.values()
    print(found)
    assert prefix["requests"] == at_random["requests"] == CONVERSATIONS * TURNS == 300
    assert at_random["cached"] > 0
    assert prefix["cached"] >= 2 * at_random["cached"]


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_replica_killed_under_load_ends_its_streams_with_an_error_and_comes_back(
    url: str, model: Path, tmp_path: Path
) -> None:
    settings = RaySettings(replicas=2, health_seconds=1)
    serve.run(build(Loader(str(model), str(tmp_path), BUDGET), settings))
    talks = [[{"role": "user", "content": f"{number}: tell me a story"}] for number in range(8)]
    streams = [chat(url, messages, max_tokens=3000, stream=True, ignore_eos=True) for messages in talks]
    homes = [stream.headers["x-kvcore-replica"] for stream in streams]
    killed = homes[0]
    assert len(set(homes)) == 2
    ends: dict[int, bytes] = {}

    def read(number: int) -> None:
        ends[number] = streams[number].read()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(len(streams))]
    for reader in readers:
        reader.start()
    os.kill(int((tmp_path / killed).read_text()), signal.SIGKILL)
    for messages in talks:  # new requests are served meanwhile
        with chat(url, messages) as answer:
            assert answer.status == 200
            assert answer.headers["x-kvcore-replica"] != killed
            assert cached_of(json.load(answer))[1] > 0
    for reader in readers:
        reader.join(600)
    for number, home in enumerate(homes):
        last = [line for line in ends[number].splitlines() if line][-1]
        if home == killed:
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
        else:
            assert last == b"data: [DONE]"
    until = time.monotonic() + 300
    while time.monotonic() < until:
        states = serve.status().applications["default"].deployments["kvcore"].replica_states
        if states.get("RUNNING") == 2 and len(list(tmp_path.iterdir())) == 3:
            return
        time.sleep(0.5)
    raise AssertionError(f"the replica did not come back: {states}")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("told", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_command_serves_until_it_is_told_to_stop(model: Path, told: signal.Signals, code: int) -> None:
    """On SIGTERM it ends what it has begun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
    own |= {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    command = ["-m", "kvcore", "serve", "--ray", "--model", str(model), "--backend", "reference", "--port", str(port)]
    process = subprocess.Popen([sys.executable, *command], env=own, cwd=HERE.parents[1])
    try:
        until = time.monotonic() + 400
        while True:
            try:
                with chat(f"http://127.0.0.1:{port}", [{"role": "user", "content": "a river"}]) as answer:
                    assert cached_of(json.load(answer))[1] > 0
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.5)
        body = json.dumps(
            {"prompt": "a river", "max_tokens": 1000, "ignore_eos": True, "stream": told == signal.SIGTERM}
        )
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body.encode(), kind), timeout=100) as answer:
            begun = answer.readline()
            process.send_signal(told)
            assert told == signal.SIGINT or (begun + answer.read()).rstrip().endswith(b"data: [DONE]")
        assert process.wait(100) == code
    finally:
        process.kill()
        process.wait(100)


# Without Ray's processes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ray", "--tensor-parallel", "2"), "--ray with --tensor-parallel: Ray starts one process"),
        (("--ray", "--allowed-origins", "*"), "--ray with --allowed-origins"),
        (("--ray", "--autoscale", "2"), "--autoscale 2: give pairs such as min_replicas=1,max_replicas=4"),
        (("--ray", "--autoscale", "min_replicas=3,max_replicas=2"), "autoscaling {"),
        (("--ray", "--routing", "fast"), "routing 'fast': choose prefix, balanced or MODULE:CLASS"),
        (("--ray", "--kv-bits", "5"), "5"),
        (("--replicas", "2", "--routing", "balanced"), "--replicas, --routing: belong to replicas on Ray Serve"),
    ],
)
def test_what_ray_cannot_do_is_refused(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvcore: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_settings_come_as_text_from_rays_command_line(model: Path) -> None:
    assert app({"model": str(model), "replicas": "2", "kv_cache_mode": "turbo4", "max_batch": "4", "gpus": "0.5"})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": "2"}, "unknown settings replica: choose from "),
        ({"replicas": "two"}, "replicas=two: Input should be a valid integer"),
        ({"replicas": "0"}, "replicas 0: must be 1 or more"),
        ({"routing": "fast"}, "routing 'fast': choose prefix, balanced or MODULE:CLASS"),
        ({"kv_cache_mode": "int3"}, "int3"),
        ({"max_batch": "0"}, "--max-batch 0: must be 1 or more"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "autoscaling "),
    ],
)
def test_settings_that_cannot_be_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        app(args)
    assert message in str(caught.value)


def test_autoscaling_and_gpus_are_passed_on() -> None:
    settings = RaySettings(autoscaling={"min_replicas": 1, "max_replicas": 4}, gpus=1, ongoing=10)
    options = settings.deployment()
    assert options["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 4}
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1}
    assert options["max_ongoing_requests"] == 10
    assert RaySettings(replicas=3).deployment()["num_replicas"] == 3
