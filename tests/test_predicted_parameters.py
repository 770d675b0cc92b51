"""Predicted parameters in use: supplied once per problem, run, tried on real calls, kept; commands that train."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from fake_model import FakePredictor
from test_sequence import QUICK
from test_verify import Clock, Timed

import convselect
from convselect import _parameters, _predictor, _remembered, _verify, dispatch, ops, settings
from convselect.kernels import BY_NAME
from convselect.model import parameter_artifact
from convselect.model.parameter_artifact import ParameterPredictor, parameter_path
from convselect.model.parameter_training import train_parameters
from convselect.model.parameters import Example, example
from convselect.problem import conv_problem
from convselect.store import Decision


@pytest.fixture(scope="module")
def direct_examples():
    """Of the C kernel `direct`, with made-up times: large groups are slow."""
    direct, found = BY_NAME["direct"], []
    for c, k, side in ((16, 32, 14), (32, 64, 28), (64, 64, 14), (64, 128, 28), (128, 128, 14), (96, 64, 20)):
        for kernel in (1, 3):
            p = conv_problem(1, c, side, side, k, kernel, kernel, padding=kernel // 2)
            if direct.why_not(p) is not None:
                pytest.skip("the C kernels are not there")
            space = direct.space(p)
            one = example(p, "direct", space, [(v, 100.0 + 9 * v["group"] + v["order"]) for v in space.programs(p)])
            assert isinstance(one, Example)
            found.append(one)
    return found


@pytest.fixture(scope="module")
def direct_file(tmp_path_factory, direct_examples):
    folder, recipe = tmp_path_factory.mktemp("params"), replace(QUICK, steps=80)
    train_parameters(direct_examples, "cpu-run", folder, {"direct": BY_NAME["direct"].revision}, recipe, folds=2)
    return parameter_path("cpu-run", folder).read_bytes()


@pytest.fixture
def at_run_time(tmp_path, monkeypatch, direct_file):
    path = tmp_path / "params.npz"
    path.write_bytes(direct_file)
    monkeypatch.setenv("CONVSELECT_PARAMS", str(path))
    _parameters.forget()
    yield path
    _parameters.forget()


def test_parameters_are_supplied_and_run(at_run_time, direct_examples, monkeypatch):
    direct, p = BY_NAME["direct"], direct_examples[3].problem
    params = _parameters.params_for(p, direct)
    assert params["group"] < direct.space(p).default(p)["group"]
    x, weight = torch.randn(p.x_shape), torch.randn(p.weight_shape)
    found = direct.run_checked(x, weight, p, params)
    torch.testing.assert_close(found, torch.conv2d(x, weight, padding=p.pad_top), rtol=1e-4, atol=1e-3)

    def again(*_):
        raise AssertionError("a remembered answer was asked for again")

    monkeypatch.setattr(ParameterPredictor, "params_for", again)
    assert _parameters.params_for(p, direct) is params
    monkeypatch.setattr("convselect._warnings._given", set())
    with pytest.warns(convselect.ConvselectWarning, match="no parameters of native"):  # whatever goes wrong
        assert _parameters.params_for(p, BY_NAME["native"]) is None


def test_off_missing_and_damaged_files_leave_the_defaults(at_run_time, direct_examples, monkeypatch):
    direct, p = BY_NAME["direct"], direct_examples[3].problem
    monkeypatch.setenv("CONVSELECT_PARAMS", "off")
    _parameters.forget()
    assert _parameters.params_for(p, direct) is None
    monkeypatch.delenv("CONVSELECT_PARAMS")
    monkeypatch.setattr(parameter_artifact, "parameter_path", lambda family: at_run_time.with_name("missing.npz"))
    _parameters.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _parameters.params_for(p, direct) is None  # none is promised for every machine
    at_run_time.write_bytes(at_run_time.read_bytes()[:999])
    monkeypatch.setenv("CONVSELECT_PARAMS", str(at_run_time))
    monkeypatch.setattr("convselect._warnings._given", set())
    _parameters.forget()
    with pytest.warns(convselect.ConvselectWarning, match="default parameters"):
        assert _parameters.params_for(p, direct) is None


# ---- in choices -------------------------------------------------------------------------------------------------


class Seen(Timed):
    """`direct`, and which parameters it ran with."""

    def __init__(self, us, clock):
        super().__init__("direct", us, clock)
        real = BY_NAME["direct"]
        self.revision, self.space, self.why_not = real.revision, real.space, real.why_not
        self.workspace_bytes, self.error_grade, self.automatic = real.workspace_bytes, real.error_grade, True
        self.seen = []

    def run_checked(self, a, b, problem, params=None, bias=None):
        self.seen.append(params)
        return super().run_checked(a, b, problem, params, bias)


@pytest.fixture
def direct(at_run_time, direct_examples, monkeypatch, tmp_path):
    """The one algorithm besides native, four times as fast on a fake clock, and liked by the model."""
    clock = Clock()
    seen = Seen(250.0, clock)
    monkeypatch.setitem(BY_NAME, "direct", seen)
    monkeypatch.setitem(BY_NAME, "native", Timed("native", 1000.0, clock))
    monkeypatch.setattr(_verify, "_wall_ns", clock)
    monkeypatch.setattr(_verify, "_thread_ns", clock)
    monkeypatch.setattr(_predictor, "get", lambda: FakePredictor("direct", gain=2.0))
    _remembered.configure(tmp_path / "store.sqlite")
    dispatch.clear()
    yield seen
    _remembered.configure("off")
    dispatch.clear()


P = conv_problem(1, 64, 28, 28, 128, 1, 1)
X, WEIGHT = torch.randn(P.x_shape), torch.randn(P.weight_shape)


def call(policy, calls=1, **settings):
    with torch.no_grad(), convselect.use(policy=policy, **settings):
        for _ in range(calls):
            y = convselect.conv2d(X, WEIGHT)
    torch.testing.assert_close(y, torch.conv2d(X, WEIGHT), rtol=1e-4, atol=1e-4)


def predicted(direct):
    found = _parameters.params_for(P, direct)
    assert found is not None  # else the tests below show nothing
    return found


def test_the_models_choice_runs_with_predicted_parameters(direct):
    call("auto", 2)
    assert direct.seen == [predicted(direct)] * 2
    (row,) = convselect.explain_problem(P)
    assert (row.algorithm, row.params) == ("direct", predicted(direct))
    assert f"takes direct order={row.params['order']}" in convselect.explain_problem(P).details()


def test_a_forced_algorithm_runs_with_its_defaults(direct):
    call("direct")
    assert direct.seen == [None]


def test_memory_that_is_allowed_is_not_exceeded(direct):
    needs = direct.workspace_bytes
    direct.workspace_bytes = lambda problem, params=None: needs(problem, None) + (2**20 if params else 0)
    call("auto", workspace_bytes=needs(P, None) + 2**19)
    call("auto", workspace_bytes=needs(P, None) + 2**21)
    assert direct.seen == [None, predicted(direct)]


def test_a_trial_tries_predicted_parameters_and_keeps_them(direct):
    call("verify", 60)
    assert direct.seen
    assert all(params == predicted(direct) for params in direct.seen)  # never the default
    with convselect.use(policy="verify"):
        (row,) = convselect.explain_problem(P)
        assert (row.source, row.params) == ("verify", predicted(direct))
        _remembered.flush()
        dispatch.clear()
        (row,) = convselect.explain_problem(P)
        assert (row.source, row.params) == ("store", predicted(direct))


def test_graphs_take_them_too(direct):
    def compiled():
        return ops.conv2d(X, WEIGHT, None, (1, 1), (0, 0, 0, 0), (1, 1), 1, "direct")

    torch.testing.assert_close(compiled(), torch.conv2d(X, WEIGHT), rtol=1e-4, atol=1e-4)
    assert direct.seen == [predicted(direct)]
    # What was found out on this machine goes before what is predicted.
    tuned = {**direct.space(P).default(P), "group": 1}
    _remembered.remember(Decision(P, settings.current().budgets, "direct", tuned, "tune", 4.0, direct.revision, 9))
    _remembered.flush()
    dispatch.clear()
    compiled()
    assert direct.seen[1:] == [tuned]


def test_networks_are_released_with_the_model(direct):
    call("auto")
    assert _parameters._loaded is not None
    convselect.unload()
    assert _parameters._loaded is None
    assert _parameters.params_for(P, direct) == direct.seen[0]  # remembered
    assert _parameters._loaded is None


def test_ranks_tell_their_files_apart(at_run_time, monkeypatch):
    first = _parameters.digest()
    assert first is not None
    at_run_time.write_bytes(at_run_time.read_bytes() + b" ")
    assert _parameters.digest() not in (first, None)
    monkeypatch.setenv("CONVSELECT_PARAMS", "off")
    assert _parameters.digest() is None


# ---- commands ---------------------------------------------------------------------------------------------------


def test_commands(tmp_path, direct_examples):
    from typer.testing import CliRunner

    from convselect.cli import _app
    from convselect.tune.programs import Program
    from convselect.tune.records import Measured, Recorded, write_recorded

    recorded = []
    for one in direct_examples:
        measured = {}
        for sequence, time_us in one.times_us.items():
            program = Program("direct", tuple(one.signature.decode(sequence).items()))
            measured[program] = Measured(program, "ok", time_us)
        recorded.append(Recorded(one.problem, {"net": 1}, measured))
    path = tmp_path / "programs.csv.gz"
    write_recorded(path, recorded, {"revisions": {"direct": BY_NAME["direct"].revision}})
    runner = CliRunner()
    options = ["--family", "cpu-x", "--out", str(tmp_path), "--steps", "40", "--folds", "2"]
    arguments = ["train-params", str(path), *options]
    out = runner.invoke(_app(), arguments)
    assert out.exit_code == 0, out.output
    assert "direct: predicted" in out.output or "direct: keeps its default" in out.output
    card = ParameterPredictor.load(parameter_path("cpu-x", tmp_path)).card
    assert (card.networks[0].algorithms, card.data["problems"]) == (("direct",), 12)
    # What was measured anew decides, not the recorded times.
    live = tmp_path / "live.json"
    for gain, low, said in ((1.02, 1.001, "predicted"), (1.02, 0.999, "keeps"), (1.009, 1.008, "keeps")):
        live.write_text(json.dumps({"live": {"direct": {"gain": gain, "gain_low": low, "of_tuned": 1.0}}}))
        out = runner.invoke(_app(), [*arguments, "--measured", str(live), "--steps", "1"])
        assert f"direct: {said}" in out.output
        assert f"{gain:.3f} times" in out.output
    # Of two measurements the worse.
    better, worse = tmp_path / "better.json", tmp_path / "worse.json"
    for path_, gain in ((better, 1.05), (worse, 1.004)):
        path_.write_text(json.dumps({"live": {"direct": {"gain": gain, "gain_low": 1.001, "of_tuned": 1.0}}}))
    twice = ["--measured", str(better), "--measured", str(worse), "--steps", "1"]
    assert "direct: keeps its default; 1.004 times" in runner.invoke(_app(), [*arguments, *twice]).output
    live.write_text("{}")
    out = runner.invoke(_app(), [*arguments, "--measured", str(live)])
    assert (out.exit_code, "no predictions that were measured" in out.output) == (2, True)
    # Times of an older revision do not speak.
    write_recorded(path, recorded, {"revisions": {"direct": 0}})
    out = runner.invoke(_app(), ["evaluate-params", str(path)])
    assert out.exit_code == 2
    assert "there is no algorithm with parameters" in out.output
    out = runner.invoke(_app(), ["evaluate-params", str(path), "--target", "worst"])
    assert out.exit_code == 2
