"""Every trace layout, and every fault with its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.scheduler import Cluster, JobSpec, load_trace
from arena_jax.scheduler.tables import artifact_cluster, load_artifact, load_elasticflow
from arena_jax.scheduler.traces import RawJob, TraceError, draw_models, own, sniff
from arena_jax.scheduler.traces.raw import load_sacct
from tests.scheduler.build import DATA, cluster, needs_data, profiles


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


jobs_strategy = st.lists(
    st.builds(
        JobSpec,
        id=st.uuids().map(str),
        arrival_s=st.floats(0, 1e9),
        num_steps=st.floats(1, 1e9),
        model=st.sampled_from(["gpt", "moe__2.4B"]),
        global_batch=st.none() | st.integers(1, 4096),
        device_type=st.none() | st.sampled_from(["a100-40", "v100-32"]),
        num_devices=st.none() | st.integers(1, 64),
        weight=st.floats(0.1, 10),
        max_devices=st.none() | st.integers(1, 64),
        allowed_types=st.sampled_from([(), ("a100",), ("a100", "a10")]),
        elastic=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda job: job.id,
)


@given(jobs_strategy)
def test_own_csv_round_trips(jobs: list[JobSpec]) -> None:
    assert own.load_csv(own.to_csv(jobs), "trace") == jobs


def test_own_json(tmp_path: Path) -> None:
    record = {"id": "a", "arrival_s": 1, "num_steps": 10, "model": "gpt", "allowed_types": ["a100"], "elastic": False}
    expected = JobSpec(id="a", arrival_s=1, num_steps=10, model="gpt", allowed_types=("a100",), elastic=False)
    assert load_trace(write(tmp_path, json.dumps([record]))) == [expected]
    assert load_trace(write(tmp_path, json.dumps({"jobs": [record]}))) == [expected]
    with pytest.raises(TraceError, match="record 2: unknown fields arival"):
        load_trace(write(tmp_path, json.dumps([record, {**record, "arival": 2}])))
    with pytest.raises(TraceError, match="record 2: id 'a' was already used"):
        load_trace(write(tmp_path, json.dumps([record, record])))


def test_all_faults_of_a_json_trace_at_once(tmp_path: Path) -> None:
    good = {"id": "a", "arrival_s": 1, "num_steps": 10, "model": "gpt"}
    records = [good, 7, {**good, "id": "b", "arrival_s": "x"}, {**good, "id": "c", "colour": 1}, good]
    with pytest.raises(TraceError, match="4 malformed records") as caught:
        load_trace(write(tmp_path, json.dumps(records)))
    assert sorted(error.partition(":")[0] for error in caught.value.errors) == [f"record {n}" for n in (2, 3, 4, 5)]


def test_itp(tmp_path: Path) -> None:
    text = "job_id,submission_time,duration,num_gpu\na,5,60,4\nb,9,0,1\nc,11,30,0\nd,12,30,64\n"
    assert load_trace(write(tmp_path, text)) == [
        RawJob(id="a", arrival_s=5, duration_s=60, num_devices=4),
        RawJob(id="d", arrival_s=12, duration_s=30, num_devices=64),
    ]


def test_helios(tmp_path: Path) -> None:
    text = (
        "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "j1,u,v,n,8,64,1,COMPLETED,2020-06-01 00:00:30,2020-06-01 00:00:30,2020-06-01 00:10:30,600,0\n"
        "j2,u,v,n,0,8,1,COMPLETED,2020-06-01 00:00:40,2020-06-01 00:00:40,2020-06-01 00:10:30,590,0\n"
    )
    [job] = load_trace(write(tmp_path, text))
    assert job == RawJob(id="j1", arrival_s=1590969630.0, duration_s=600, num_devices=8)


def test_pai_with_and_without_header(tmp_path: Path) -> None:
    rows = (
        "job1,ps,1,Terminated,100.0,160.0,600.0,10.0,,MISC\n"
        "job1,worker,2,Terminated,110.0,200.0,600.0,29.0,50.0,V100\n"
        "job2,tensorflow,1,Failed,120.0,,600.0,29.0,100.0,T4\n"
        "job3,worker,4,Terminated,130.0,190.0,600.0,29.0,100.0,MISC\n"
    )
    header = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    expected = [
        RawJob(id="job1", arrival_s=110, duration_s=90, num_devices=1, device_type="V100"),
        RawJob(id="job3", arrival_s=130, duration_s=60, num_devices=4),
    ]
    assert load_trace(write(tmp_path, rows)) == expected
    assert load_trace(write(tmp_path, header + rows)) == expected


def test_philly(tmp_path: Path) -> None:
    def record(name: str, **other: object) -> dict[str, object]:
        detail = [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]
        attempts = [{"start_time": "2017-10-03 01:06:00", "end_time": "2017-10-03 01:16:00", "detail": detail}] * 2
        return {
            "status": "Pass",
            "vc": "v",
            "jobid": name,
            "attempts": attempts,
            "submitted_time": "2017-10-03 01:05:00",
        } | other

    [job] = load_trace(write(tmp_path, json.dumps([record("a"), record("b", attempts=[])])))
    assert (job.id, job.duration_s, job.num_devices) == ("a", 1200.0, 3)
    bad = record("b")
    del bad["attempts"]
    with pytest.raises(TraceError, match="record 2: attempts is missing"):
        load_trace(write(tmp_path, json.dumps([record("a"), bad])))
    with pytest.raises(TraceError, match="record 1: not a time"):
        load_trace(write(tmp_path, json.dumps([record("a", submitted_time="yesterday")])))


def test_sacct() -> None:
    text = (
        "JobID|Submit|Start|End|Elapsed|State|AllocTRES\n"
        "1|2024-01-01T00:00:00|2024-01-01T00:05:00|2024-01-02T01:05:00|1-01:00:00|COMPLETED|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4\n"
        "1.batch|2024-01-01T00:00:00|2024-01-01T00:05:00|2024-01-02T01:05:00|1-01:00:00|COMPLETED|cpu=8\n"
        "2|2024-01-01T00:00:10|2024-01-01T00:05:00|2024-01-01T00:05:30|00:00:30|COMPLETED|cpu=8\n"
    )
    assert sniff(text, "x") == "sacct"
    assert load_sacct(text, "x") == [
        RawJob(id="1", arrival_s=1704067200.0, duration_s=90000.0, num_devices=4, device_type="a100")
    ]


def test_elasticflow_jobs(tmp_path: Path) -> None:
    text = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,2,30,500,resnet50,60,1\n"
    [job] = load_trace(write(tmp_path, text))
    assert job == JobSpec(id="1", arrival_s=30, num_steps=500, model="resnet50", num_devices=2)


def test_elasticflow_jobs_as_published(tmp_path: Path) -> None:
    text = "job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,duration,iteration\n"
    [job] = load_trace(write(tmp_path, text + "7,100,900,bert,700,64,4,60,60,800\n"))
    assert job == JobSpec(
        id="7", arrival_s=100, num_steps=800, model="bert", global_batch=64, num_devices=4, deadline_s=700
    )
    short = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n"
    assert load_trace(write(tmp_path, short + "7,100,800,bert,700,64,4,60\n")) == [job]


def test_blank_lines_before_the_header_count(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 5: num_steps is not a number"):
        load_trace(write(tmp_path, "\n\nid,arrival_s,num_steps,model\na,0,1,m\nb,0,x,m\n"))


def test_all_faults_at_once_with_their_lines(tmp_path: Path) -> None:
    text = (
        "id,arrival_s,num_steps,model,num_devices\n"
        "a,0,10,m,1\n"
        "b,-1,10,m,1\n"
        "c,nan,10,m,1\n"
        "d,0,ten,m,1\n"
        "a,0,10,m,1\n"
        "e,0,10,m,1.5\n"
        "f,0,10,,1\n"
        "g,0,10,m,1,7\n"
        "h,inf,10,m,1\n"
        "i,0,0,m,1\n"
    )
    with pytest.raises(TraceError) as caught:
        load_trace(write(tmp_path, text))
    lines = [error.partition(":")[0] for error in caught.value.errors]
    assert lines == ["line 3", "line 4", "line 5", "line 6", "line 7", "line 8", "line 9", "line 10", "line 11"]
    assert "already used on line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("foo,bar\n1,2\n", "no known trace layout"),
        ("id,arrival_s,num_steps,model\n", "holds no jobs"),
        ("id,arrival_s,num_steps,model,colour\na,0,1,m,red\n", "unknown column 'colour'"),
        ("[1,", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "holds no jobs"),
        ('[{"jobid": "a"}, 3]', "record 2: not an object"),
        ("id,arrival_s,num_steps,model\na,0,1," + "m" * 200_000, "line 2 is not CSV"),
        ("JobID|Submit\n1|2020-01-01\n", "line 2: no duration"),
        ('{"a": 1}', "expected a list"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read trace"):
        load_trace(tmp_path / "none.csv")


@given(st.text(max_size=300))
def test_no_text_crashes_the_reader(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(("id,arrival_s,num_steps,model\n" + text).encode("utf-8", "surrogatepass"))
        try:
            load_trace(path)
        except TraceError:
            pass


def test_drawn_jobs_take_as_long_as_logged() -> None:
    on: Cluster = cluster(a100=(4, 4), a10=(4, 2))
    known = profiles(x={"a100:1": 2.0, "a100:4": 0.7, "a10:2": 1.5}, y={"a100:4": 1.1})
    raw = [RawJob(id=str(i), arrival_s=i, duration_s=700.0 + i, num_devices=n) for i, n in enumerate([1, 3, 4, 64, 2])]
    jobs = draw_models(raw, known, on, 0, max_devices=4)
    assert [job.num_devices for job in jobs] == [1, 4, 4, 4, 2]
    assert jobs == draw_models(raw, known, on, 0, max_devices=4)
    for logged, job in zip(raw, jobs, strict=True):
        table = known.profile(job.model, job.global_batch)
        allocation = on.packed(job.device_type or "", job.num_devices or 0)
        assert allocation is not None
        assert job.num_steps * (table.step_time_s(allocation) or 0) == pytest.approx(logged.duration_s, rel=0.01)


@needs_data
def test_real_files_load() -> None:
    assert len(load_trace(DATA / "arena_artifact/traces/pai.csv")) == 125
    assert len(load_trace(DATA / "arena_artifact/traces/helios_venus.csv")) == 438
    assert len(load_trace(DATA / "itp/cluster10.csv")) > 200
    on = artifact_cluster()
    artifact = load_artifact(DATA / "arena_artifact/measured_iteration_seconds.csv", on)
    assert ("bert__760M", 128) in set(artifact.pairs())
    falling = load_elasticflow(DATA / "elasticflow/throughputs_A100", on)
    gpt2 = falling.profile("gpt2", 128)
    times = [gpt2.step_time_s(a) for n in (16, 32, 64) if (a := on.packed("a100-40", n)) is not None]
    assert times == sorted(times)  # slower past 16 devices
