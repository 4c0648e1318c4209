"""The socket: what it refuses, what it bounds, and that nothing that is sent takes the service down."""

import json
import os
import random
import socket
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import UsageError
from arena_jax.service import requests as requests_module
from arena_jax.service import server as server_module
from arena_jax.service.protocol import MAX_REQUEST_BYTES, ServiceError, call, state_folder
from arena_jax.service.server import Server
from tests.service.stub import Bench, recipe


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def served(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "RATE_PER_S", 1e6)
    monkeypatch.setattr(server_module, "BURST", 1e6)
    server = Server(tmp_path / "state", bench.requests.answer)
    yield tmp_path / "state"
    server.close()


def raw(state, data: bytes, *, half_close: bool = True) -> bytes:
    path = json.loads((state / "service.json").read_text())["socket"]
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(path)
        try:
            client.sendall(data)
            if half_close:
                client.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
        return answer


def test_a_request_is_answered_over_the_socket(served, bench):
    assert call(served, {"do": "submit", "job": recipe().to_json()})["job"]["state"] == "planning"
    bench.run(5)
    (job,) = call(served, {"do": "status"})["jobs"]
    assert (job["id"], job["state"], job["allocation"]) == ("gpt-1", "running", "quick:2x4")
    assert call(served, {"do": "logs", "job": "gpt-1", "offset": 6})["text"] == "line\nlast line\n"
    with pytest.raises(UsageError, match=r"no job 'gtp-1'.*gpt-1"):
        call(served, {"do": "cancel", "job": "gtp-1"})
    kinds = [event["kind"] for event in call(served, {"do": "events", "job": "gpt-1"})["events"]]
    assert kinds == ["submit", "planned", "start"]


def test_only_the_owner_can_reach_it(served):
    path = json.loads((served / "service.json").read_text())["socket"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(served).st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_connect(served, bench):
    path = json.loads((served / "service.json").read_text())["socket"]
    code = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    # Even where a folder's mode was loosened by hand, who connects is checked.
    folder = served
    while folder != folder.parent:
        folder.chmod(folder.stat().st_mode | 0o755)
        folder = folder.parent
    os.chmod(path, 0o666)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "print(s.recv(1000))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "you are user 65534" in done.stdout


def test_requests_are_bounded_in_size_time_and_rate(tmp_path, bench, monkeypatch):
    monkeypatch.setattr(server_module, "READ_S", 0.2)
    monkeypatch.setattr(server_module, "BURST", 5.0)
    monkeypatch.setattr(server_module, "RATE_PER_S", 1.0)
    server = Server(tmp_path / "state", bench.requests.answer)
    try:
        state = tmp_path / "state"
        assert b"one line of at most" in raw(state, b'{"do": "' + b"x" * (MAX_REQUEST_BYTES + 10) + b'"}\n')
        began = time.monotonic()
        assert b"no request came within" in raw(state, b'{"do": ', half_close=False)
        assert time.monotonic() - began < 5
        answers = [json.loads(raw(state, b'{"do": "status"}\n')) for _ in range(8)]
        assert "busy" in answers[-1]
        assert "jobs" in answers[0]
    finally:
        server.close()


def test_a_long_path_and_no_service(tmp_path, bench):
    state = tmp_path / ("long" * 30)
    server = Server(state, bench.requests.answer)
    assert call(state, {"do": "status"})["jobs"] == []
    server.close()
    with pytest.raises(ServiceError, match="no service runs"):
        call(state, {"do": "status"})


def test_the_state_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("ARENA_JAX_SERVICE", str(tmp_path))
    assert state_folder() == tmp_path
    assert state_folder("/x") != tmp_path
    monkeypatch.delenv("ARENA_JAX_SERVICE")
    assert state_folder().name == "service"


def test_ten_thousand_fuzzed_requests_do_not_take_it_down(bench, monkeypatch):
    """Mutated requests, through the whole path but the kernel's socket."""
    monkeypatch.setattr(requests_module, "MAX_QUEUED", 20)
    draw = random.Random(0)
    job = bench.submit(recipe())
    bench.run(3)
    good = [
        {"do": "submit", "job": recipe("fuzz").to_json()},
        {"do": "status", "job": job.id, "ended": 3},
        {"do": "cancel", "job": job.id},
        {"do": "resize", "job": job.id, "grid": "quick:4"},
        {"do": "drain", "node": "quick/1"},
        {"do": "logs", "job": job.id, "offset": 0},
        {"do": "events", "after": 0, "last": 10, "job": job.id},
    ]
    odd = [
        None,
        True,
        -1,
        1 << 70,
        1e308,
        float("nan"),
        "",
        "\0",
        "\ud800",
        "x" * 500,
        [],
        {},
        [[]],
        "quick:4",
        "auto",
        "-1",
    ]

    def mutate(value):
        if isinstance(value, dict) and draw.random() < 0.8:
            value = dict(value)
            key = draw.choice([*value, "more"]) if value else "more"
            value[key] = mutate(value.get(key))
            if draw.random() < 0.2:
                value.pop(draw.choice(list(value)))
            return value
        return draw.choice(odd)

    for number in range(10_000):
        request = mutate(draw.choice(good))
        try:
            text = json.dumps(request)
        except ValueError:
            continue
        answer = bench.requests.answer(json.loads(text))
        json.dumps(answer)
        if number % 1000 == 0:
            bench.loop.tick()
            bench.clock.now += 1
    bench.run(5)
    assert bench.requests.answer({"do": "status"})["counts"]


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer_or_a_closed_connection(shared_server, data):
    answer = raw(shared_server, data + b"\n")
    assert answer == b"" or "error" in json.loads(answer)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    server = Server(folder / "state", Bench(folder).requests.answer)
    yield folder / "state"
    server.close()
