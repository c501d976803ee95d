"""Which backend the CPU tensors of a test run on."""

import pytest


@pytest.fixture
def host_library():
    """The host build; the test is skipped where there is no compiler."""
    pytest.importorskip("torch")
    from mxsim.kernels import build, host

    try:
        return host.library()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["host", "simulated"])
def backend(request, monkeypatch):
    """Both backends of CPU tensors: the host build, and what stands in for it without a compiler."""
    pytest.importorskip("torch")
    from mxsim.kernels import host, operators, simulated

    if request.param == "host":
        request.getfixturevalue("host_library")
    module = host if request.param == "host" else simulated
    for name in host.FUNCTIONS:
        monkeypatch.setitem(vars(operators._HOST), name, getattr(module, name))
    return module
