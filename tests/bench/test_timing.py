"""Timing: on a made-up device whose queue and clocks are simulated, and on the CPU."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench import timing  # noqa: E402
from mxsim.bench.timing import (  # noqa: E402
    Method,
    calls_on_copies,
    copy_of,
    host_and_wall_us,
    overhead_us,
    time_calls,
    time_in_turn,
)
from mxsim.kernels import Fp8Rows  # noqa: E402

CUDA = torch.device("cuda", 0)
CYCLES_PER_US = 2000


class FakeDevice:
    """Works off what is enqueued in order; host and device have clocks in microseconds."""

    def __init__(self, launch_us, kernel_us, gap_us=0.0):
        self.launch_us, self.kernel_us, self.gap_us = launch_us, kernel_us, gap_us
        self.host_us = self.free_at_us = 0.0
        self.captured = None
        self.num_kernels = self.num_graphs = self.num_slept = 0

    def run(self, us):
        self.free_at_us = max(self.free_at_us, self.host_us) + us

    def call(self):
        if self.captured is not None:
            self.captured.append(self.kernel_us)
            return
        self.host_us += self.launch_us
        self.num_kernels += 1
        self.run(self.kernel_us + self.gap_us)

    def sleep(self, cycles):
        self.num_slept += 1
        self.run(cycles / CYCLES_PER_US)

    def synchronize(self, *_):
        self.host_us = max(self.host_us, self.free_at_us)


@pytest.fixture
def install(monkeypatch):
    """Put a fake device in the place of torch.cuda."""

    def put(device):
        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                device.run(0)
                self.at_us = device.free_at_us

            def query(self):
                return device.host_us >= self.at_us

            def elapsed_time(self, end):
                return (end.at_us - self.at_us) / 1e3

        class Graph:
            def replay(self):
                device.host_us += 5.0
                device.num_graphs += 1
                device.run(sum(self.kernels))

        @contextlib.contextmanager
        def capture(graph):
            device.captured = graph.kernels = []
            yield
            device.captured = None

        for name, value in {
            "Event": Event,
            "_sleep": device.sleep,
            "synchronize": device.synchronize,
            "CUDAGraph": Graph,
            "graph": capture,
            "device": lambda _: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return device

    return put


def test_back_to_back_launches_are_timed_without_python(install):
    device = install(FakeDevice(launch_us=15.0, kernel_us=150.0))
    result = time_calls([device.call], CUDA, 5)
    assert result.us == pytest.approx(150.0)
    assert result.method is Method.QUEUE
    assert result.num_samples == 5
    assert result.is_queue_full


def test_slow_python_makes_the_device_wait_longer_and_does_not_count(install):
    device = install(FakeDevice(launch_us=900.0, kernel_us=100.0))
    result = time_calls([device.call], CUDA, 3)
    assert result.us == pytest.approx(100.0)
    assert result.is_queue_full
    assert device.num_slept > 3 + 1  # some samples were taken again


def test_a_queue_that_cannot_be_filled_is_reported(install, monkeypatch):
    monkeypatch.setattr(timing, "_MAX_WAIT_CYCLES", 1_000_000)
    device = install(FakeDevice(launch_us=9000.0, kernel_us=100.0))
    assert not time_calls([device.call], CUDA, 3).is_queue_full


def test_short_calls_are_replayed_from_a_graph(install):
    device = install(FakeDevice(launch_us=10.0, kernel_us=12.0, gap_us=3.0))
    calls = [device.call] * 5
    result = time_calls(calls, CUDA, 3)
    assert result.method is Method.GRAPH
    assert result.us == pytest.approx(12.0)  # without the gaps between launches
    assert result.calls_per_sample % len(calls) == 0
    assert device.num_graphs > 3


def test_calls_take_turns_and_keep_their_results():
    seen = []
    turns = timing._Turns([lambda: seen.append("a") or object(), lambda: seen.append("b") or object()])
    turns.make(5)
    assert "".join(seen) == "ababa"
    assert None not in turns._kept


def test_time_on_the_cpu_is_the_wall_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 0.4

    result = time_calls([call], torch.device("cpu"), 9)
    assert result.us == pytest.approx(4e5)
    assert result.method is Method.CPU
    assert result.num_samples == 6  # enough after two seconds
    assert result.calls_per_sample == 1


def test_overhead_is_the_median_and_leaves_the_queue_short(install, monkeypatch):
    device = install(FakeDevice(launch_us=8.0, kernel_us=2.0))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: round(1e3 * device.host_us))
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: synchronized.append(device.num_kernels))
    assert overhead_us(device.call, CUDA, 200) == pytest.approx(8.0)
    assert len(synchronized) >= 4


def test_cache_bytes_of_the_cpu_is_plausible():
    assert 2**18 <= timing.cache_bytes(torch.device("cpu")) <= 2**32


def test_a_copy_has_the_values_and_strides_and_other_memory():
    x = torch.arange(24.0).view(4, 6).t()
    y = copy_of(x)
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    assert y.data_ptr() != x.data_ptr()


def test_works_take_turns_sample_by_sample(install):
    device, seen = install(FakeDevice(launch_us=10.0, kernel_us=0.0)), []

    def call(name, kernel_us):
        def run():
            seen.append(name)
            device.kernel_us = kernel_us
            device.call()

        return run

    slow, slower = time_in_turn([[call("a", 3000.0)], [call("b", 5000.0)]], CUDA, 4)
    assert (slow.us, slower.us) == (pytest.approx(3000.0), pytest.approx(5000.0))
    assert (slow.num_samples, slow.calls_per_sample) == (4, 1)
    assert "".join(seen[-8:]) == "abababab"


def test_a_long_call_is_estimated_alone(install):
    """Five steps of a layer would not fit into the launch queue."""
    device = install(FakeDevice(launch_us=10.0, kernel_us=20000.0))
    time_calls([device.call], CUDA, 2)
    assert device.num_kernels == 3 + 1 + 2


def test_the_wait_for_a_step_is_bounded(install):
    device = install(FakeDevice(launch_us=50_000.0, kernel_us=2000.0))
    (timing,) = time_in_turn([[device.call]], CUDA, 2, max_wait_cycles=4_000_000)
    assert not timing.is_queue_full
    assert device.host_us < 1e6


def test_host_time_is_alone_and_wall_time_is_shared(install, monkeypatch):
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: round(1e3 * device.host_us))
    device = install(FakeDevice(launch_us=30.0, kernel_us=100.0))
    host, wall = host_and_wall_us(device.call, CUDA, 50)
    assert host == pytest.approx(30.0)
    assert wall == pytest.approx(100.0, rel=0.02)
    device = install(FakeDevice(launch_us=300.0, kernel_us=100.0))
    host, wall = host_and_wall_us(device.call, CUDA, 50)
    assert (host, wall) == (pytest.approx(300.0), pytest.approx(300.0, rel=0.02))


def test_calls_on_copies_pass_the_cache():
    rows = Fp8Rows(torch.ones(4, 4), torch.ones(4, 1))
    seen = []
    calls, is_in_cache = calls_on_copies(lambda *inputs: seen.append(inputs), (rows, None), 100, cache=150)
    assert len(calls) == 6  # 4 caches of 150
    assert not is_in_cache
    for call in calls:
        call()
    assert len({inputs[0].codes.data_ptr() for inputs in seen}) == 6
    assert all(type(inputs[0]) is Fp8Rows and inputs[1] is None for inputs in seen)
    assert seen[0][0] is rows
    calls, is_in_cache = calls_on_copies(print, (), 1, cache=150)
    assert len(calls) == 32
    assert is_in_cache
