"""Parameters by a sequence network: numpy computes what torch does, decoded programs are valid, held-out problems gain;
files; the commands."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks._recorded import Recorded, write_recorded
from benchmarks.predicted_parameters.__main__ import app
from benchmarks.predicted_parameters.artifact import (
    HERE,
    NetworkCard,
    ParameterCard,
    ParameterPredictor,
    parameter_path,
    save,
)
from benchmarks.predicted_parameters.decoding import Decoder, beam_search
from benchmarks.predicted_parameters.figures import (
    best_fixed,
    figures,
    folds_of,
    held_out,
    judge,
    neighbour,
    per_token,
)
from benchmarks.predicted_parameters.sequence import Recipe, SequenceNetwork, export, train
from benchmarks.predicted_parameters.study import made_up, made_up_space
from benchmarks.predicted_parameters.tokens import (
    FIELDS,
    RATIO_EXPONENT,
    VOCABULARY,
    Example,
    Signature,
    coverage,
    covered,
    example,
    target,
    tokens,
)
from benchmarks.predicted_parameters.training import train_parameters
from convselect.base.problem import conv_problem
from convselect.kernels._space import Parameter, Space
from convselect.kernels.pool import BY_NAME
from convselect.model.artifact import ArtifactError
from convselect.tune.programs import Program
from convselect.tune.records import Measured

P = conv_problem(1, 16, 14, 14, 16, 3, 3, padding=1)
QUICK = Recipe(width=12, encoder=12, steps=150, learning_rate=4e-3)


@pytest.fixture(scope="module")
def network():
    """Untrained, with weights large enough that its answers differ from problem to problem."""
    signature = Signature.of(made_up_space())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        centre, scale = np.full(len(FIELDS), 4, np.float32), np.full(len(FIELDS), 0.5, np.float32)
        made = SequenceNetwork(signature, QUICK, centre, scale).eval()
        with torch.no_grad():
            made.embedding.weight.normal_()
            made.out.weight.mul_(8)
    return made


def decoder(network, problem=P):
    return Decoder(export(network), network.sizes, *tokens(problem, 0))


# ---- tokens and targets -----------------------------------------------------------------------------------------


def test_tokens_tell_problems_apart():
    ids, numbers = tokens(P, 0)
    assert ids.shape == numbers.shape == (len(FIELDS),)
    assert ids.min() >= 0
    assert ids.max() < VOCABULARY
    assert len(set(ids.tolist())) == len(FIELDS)  # no token belongs to two fields
    for field, value in (("C", 17), ("stride_h", 2), ("layout", "channels_last"), ("direction", "backward_data")):
        from convselect.base.problem import Direction

        other = P._replace(**{field: Direction(value) if field == "direction" else value})
        others = tokens(other, 0)
        assert not np.array_equal(others[0], ids) or not np.array_equal(others[1], numbers), field
    assert tokens(P, 1)[0][0] != ids[0]
    with pytest.raises(ValueError, match="nothing to compute"):
        tokens(P._replace(N=0), 0)
    with pytest.raises(ValueError, match="share a network"):
        tokens(P, 16)


def test_tokens_of_the_largest_problem_stay_in_their_fields():
    ids, _ = tokens(conv_problem(4096, 65536, 60000, 60000, 65536, 99, 99, padding=49, threads=512), 0)
    assert (np.diff(ids) > 0).all()
    assert ids.max() < VOCABULARY


def test_targets_weigh_by_speed():
    space = Space((Parameter("a", (0, 1, 2, 3)),), default=lambda p: {"a": 3})
    one = example(P, "x", space, [({"a": 0}, 100.0), ({"a": 1}, 101.0), ({"a": 2}, 103.0), ({"a": 3}, 200.0)])
    assert target(one, "best") == {(0,): 1.0}
    near = target(one, "near")
    assert set(near) == {(0,), (1,)}
    assert near[(1,)] / near[(0,)] == pytest.approx(1 / 1.01)
    ratio = target(one, "ratio")
    assert set(ratio) == {(0,), (1,), (2,)}
    assert ratio[(2,)] / ratio[(0,)] == pytest.approx(1.03**-RATIO_EXPONENT)
    assert sum(ratio.values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="a target is one of"):
        target(one, "worst")


def test_examples_need_their_default_and_drop_what_is_not_valid():
    space = Space(
        (Parameter("a", (0, 1, 2)),), default=lambda p: {"a": 0}, allowed=lambda p, v: v.get("a") != 2
    )  # fmt: skip
    assert example(P, "x", space, [({"a": 1}, 1.0), ({"a": 2}, 1.0)]) is None
    assert example(P, "x", space, [({"a": 0}, 1.0), ({"a": 2}, 1.0)]) is None
    one = example(P, "x", space, [({"a": 0}, 2.0), ({"a": 1}, 1.0), ({"a": 2}, 0.5)])
    assert (one.best, one.default, dict(one.times_us)) == ((1,), (0,), {(0,): 2.0, (1,): 1.0})


# ---- network and search -----------------------------------------------------------------------------------------


def test_numpy_says_what_torch_says(network):
    rng = np.random.default_rng(0)
    problems = [P, conv_problem(8, 64, 56, 56, 256, 1, 1), conv_problem(2, 3, 224, 200, 64, 7, 7, stride=2, padding=3)]
    for problem in problems:
        programs = np.stack([[rng.integers(size) for size in network.sizes] for _ in range(20)])
        ids, numbers = tokens(problem, 0)
        with torch.no_grad():
            want = network(
                torch.from_numpy(ids)[None], torch.from_numpy(numbers)[None], torch.zeros(20, dtype=torch.long),
                torch.from_numpy(programs),
            ).numpy()  # fmt: skip
        assert want.std() > 0.3  # otherwise agreement would say little
        d = decoder(network, problem)
        state, found = d.start, []
        state = type(state)(np.repeat(state.hidden, 20, 0), np.repeat(state.cell, 20, 0))
        previous: list[int] = []
        for i in range(len(network.sizes)):
            state, scores = d.step(state, i, previous)
            found.append(scores[np.arange(20) if len(scores) > 1 else np.zeros(20, int), programs[:, i]])
            previous = programs[:, i].tolist()
        np.testing.assert_allclose(np.stack(found, 1), want, atol=2e-5)


def log_probabilities(network, problem):
    """Log-probabilities of every combination of values, valid or not."""
    grid = torch.cartesian_prod(*(torch.arange(size) for size in network.sizes))
    ids, numbers = tokens(problem, 0)
    with torch.no_grad():
        total = network(
            torch.from_numpy(ids)[None], torch.from_numpy(numbers)[None], torch.zeros(len(grid), dtype=torch.long), grid
        ).sum(1)
    return {tuple(s): p for s, p in zip(grid.tolist(), total.tolist(), strict=True)}


def test_a_wide_beam_finds_the_most_probable_valid_program(network):
    space, signature = made_up_space(), Signature.of(made_up_space())
    exhaustive = log_probabilities(network, P)
    assert sum(map(math.exp, exhaustive.values())) == pytest.approx(1, abs=1e-4)
    valid = {s: v for s, v in exhaustive.items() if space.is_valid(P, signature.decode(s))}
    assert 0 < len(valid) < len(exhaustive)
    found = beam_search(
        decoder(network), network.sizes, len(exhaustive), lambda s: space.is_partially_valid(P, signature.decode(s))
    )
    assert {one.sequence for one in found} == set(valid)
    assert [one.log_probability for one in found] == sorted((o.log_probability for o in found), reverse=True)
    assert found[0].log_probability == pytest.approx(max(valid.values()), abs=1e-4)
    free = beam_search(decoder(network), network.sizes, len(exhaustive))
    assert free[0].log_probability == pytest.approx(max(exhaustive.values()), abs=1e-4)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_what_is_decoded_is_valid_and_without_constraints_often_not(network, k):
    space, signature = made_up_space(), Signature.of(made_up_space())
    invalid = 0
    for problem in [one.problem for one in made_up(25, seed=1)]:
        of = decoder(network, problem)
        found = beam_search(
            of, network.sizes, k, lambda s, p=problem: space.is_partially_valid(p, signature.decode(s))
        )  # fmt: skip
        assert len(found) == k
        assert all(space.is_valid(problem, signature.decode(one.sequence)) for one in found)
        free = beam_search(of, network.sizes, k)
        invalid += not space.is_valid(problem, signature.decode(free[0].sequence))
    assert invalid > 0


def test_the_space_is_asked_little_and_once(network):
    asked: list[tuple[int, ...]] = []
    beam_search(decoder(network), network.sizes, 4, lambda s: asked.append(s) or True)
    assert len(asked) == len(set(asked)) == 2 + 4 * 4  # as many as are kept, if all are allowed


def test_where_nothing_is_valid_nothing_is_found(network):
    assert beam_search(decoder(network), network.sizes, 4, lambda s: False) == []


# ---- training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples():
    return made_up(50)


@pytest.fixture(scope="module")
def trained(examples):
    return train(examples, ["made_up"], QUICK)


def test_training_is_repeatable_and_leaves_the_generator_alone(examples):
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    a, b = (export(train(examples[:6], ["made_up"], replace(QUICK, steps=5))) for _ in range(2))
    assert torch.rand(1) == want
    assert all(np.array_equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match="one signature"):
        train([], ["made_up"], QUICK)


@pytest.mark.slow
def test_held_out_problems_come_near_the_best_program():
    judged = held_out(made_up(50), QUICK, folds=2, widths=(4,))
    told = {name: figures(of) for name, of in judged.items()}
    found, default = told["k=4"], told["default"]
    assert found["valid"] == found["recorded"] == 1
    assert found["fraction"] > default["fraction"] + 0.05
    assert found["fraction"] > 0.93
    assert found["gain_low"] > 1
    assert default["gain"] == 1
    assert told["unconstrained k=4"]["valid"] <= 1


def test_folds_keep_a_problem_together(examples):
    twice = [*examples, *(replace(one, algorithm="another") for one in examples)]
    folds = folds_of(twice, 5, 0)
    assert folds[: len(examples)] == folds[len(examples) :]
    assert set(folds) == set(range(5))
    with pytest.raises(ValueError, match="too few"):
        folds_of(examples[:3], 5, 0)


def test_baselines_do_what_they_say(examples):
    known, asked = examples[1:], examples[0]
    assert neighbour(examples)(asked) == asked.best  # itself is nearest
    fixed = best_fixed(known)(asked)
    assert asked.is_valid(fixed)
    logs = {
        s: np.mean([math.log(e.times_us[s] / e.best_us) for e in known if s in e.times_us])
        for s in {s for e in known for s in e.times_us}
        if sum(s in e.times_us for e in known) * 2 >= len(known) and asked.is_valid(s)
    }
    assert logs[fixed] == pytest.approx(min(logs.values()))
    said = judge(per_token(known, ["made_up"], replace(QUICK, steps=20)), asked)
    assert len(said.right) == 5


def test_an_invalid_prediction_counts_as_the_default(examples):
    one = examples[0]
    invalid = tuple(len(p.values) - 1 for p in one.space.parameters)
    assert not one.is_valid(invalid)
    said = judge(lambda _: invalid, one)
    assert (said.valid, said.recorded, said.fraction) == (False, False, said.default)
    assert figures([said])["valid"] == 0
    assert judge(lambda _: None, one).fraction == said.default


def test_what_was_not_measured_is_judged_by_its_neighbour():
    space = Space((Parameter("a", (0, 1, 2, 3)), Parameter("b", (0, 1))), default=lambda p: {"a": 0, "b": 0})
    one = example(P, "x", space, [({"a": 0, "b": 0}, 9.0), ({"a": 3, "b": 1}, 4.0), ({"a": 3, "b": 0}, 5.0)])
    assert one.time_us((2, 1)) == 4.0
    assert one.time_us((3, 0)) == 5.0
    assert not judge(lambda _: (2, 1), one).recorded


def test_coverage():
    by = coverage([P, P._replace(C=64, R=1, S=1)])
    assert covered(P._replace(C=32), by)
    for change in (
        dict(C=128),
        dict(N=2),
        dict(R=5),
        dict(layout="channels_last"),
        dict(threads=2),
        dict(device="cuda"),
    ):
        assert not covered(P._replace(**change), by), change
    assert covered(P, json.loads(json.dumps(by)))


# ---- files ------------------------------------------------------------------------------------------------------


class Algorithm:
    """As little of an algorithm as a predictor asks of."""

    def __init__(self, name="made_up", revision=1, space=None, why_not=None):
        self.name, self.revision = name, revision
        self._space, self._why_not = space or made_up_space(), why_not

    def why_not(self, problem):
        return self._why_not

    def space(self, problem):
        return self._space


GAINS = {"made_up": {"gain": 1.2, "gain_low": 1.1}}


def card_of(examples, **changes):
    signature = examples[0].signature
    network = NetworkCard(
        signature.names, signature.values, ("made_up",), {"made_up": 1},
        coverage(one.problem for one in examples), GAINS, 4,
    )  # fmt: skip
    return ParameterCard("cpu-test", (replace(network, **changes),))


@pytest.fixture
def file(tmp_path, trained, examples):
    path = parameter_path("cpu-test", tmp_path)
    save(path, card_of(examples), [export(trained)])
    return path


@pytest.mark.slow
def test_a_file_says_what_was_trained(file, trained, examples):
    predictor = ParameterPredictor.load(file)
    signature = examples[0].signature
    same = 0
    for one in examples:
        params = predictor.params_for(one.problem, Algorithm())
        assert params is None or one.space.is_valid(one.problem, params)
        found = beam_search(
            decoder(trained, one.problem), trained.sizes, 4,
            lambda s, of=one: of.space.is_partially_valid(of.problem, signature.decode(s)),
        )  # fmt: skip
        same += (params or one.space.default(one.problem)) == signature.decode(found[0].sequence)
    assert same >= 0.9 * len(examples)  # float16 may turn a near tie
    assert json.loads(file.with_suffix(".json").read_text())["family"] == "cpu-test"
    assert predictor.params_for(examples[0].problem, Algorithm()) is not None


@pytest.mark.slow
def test_what_a_file_does_not_speak_for(file, trained, examples, tmp_path):
    predictor, problem = ParameterPredictor.load(file), examples[0].problem
    assert predictor.params_for(problem, Algorithm()) is not None
    for algorithm in (
        Algorithm("unknown"),
        Algorithm(revision=2),
        Algorithm(why_not="it does not apply"),
        Algorithm(space=Space((Parameter("rows", (1, 2)),), lambda p: {"rows": 1})),
    ):
        assert predictor.params_for(problem, algorithm) is None
    assert predictor.params_for(problem._replace(N=64), Algorithm()) is None
    assert predictor.params_for(problem._replace(dtype="bfloat16"), Algorithm()) is None
    # If the default is as good, or a gain not certain, it stays.
    for gain, low in ((1.005, 1.001), (1.05, 0.99)):
        path = tmp_path / "other.npz"
        save(path, card_of(examples, figures={"made_up": {"gain": gain, "gain_low": low}}), [export(trained)])
        other = ParameterPredictor.load(path)
        assert other.params_for(problem, Algorithm()) is None
        assert other.params_for(problem, Algorithm(), always=True) is not None


@pytest.mark.slow
def test_a_prediction_that_is_the_default_is_none(file, examples):
    predictor = ParameterPredictor.load(file)
    problem = examples[0].problem
    params = predictor.params_for(problem, Algorithm())
    same = replace(made_up_space(), default=lambda p: params)
    assert predictor.params_for(problem, Algorithm(space=same)) is None


def rewritten(path, **changes):
    with np.load(path) as archive:
        stored = {name: archive[name] for name in archive.files}
    stored.update(changes)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in stored.items() if array is not None})
    return buffer.getvalue()


@pytest.mark.slow
def test_damaged_files_are_refused(file):
    whole = file.read_bytes()
    card = json.loads(file.with_suffix(".json").read_text())
    without_k = {**card, "networks": [{k: v for k, v in card["networks"][0].items() if k != "k"}]}
    with np.load(file) as archive:
        out = archive["0/out"]
    for data, message in (
        (b"", "damaged"),
        (whole[: len(whole) // 2], "damaged"),
        (rewritten(file, card=None), "no card"),
        (rewritten(file, card=np.array("{")), "not readable"),
        (rewritten(file, card=np.array(json.dumps({**card, "format_version": 9}))), "retrain"),
        (rewritten(file, card=np.array(json.dumps({**card, "descriptor_version": 9}))), "retrain"),
        (rewritten(file, card=np.array(json.dumps(without_k))), "lacks a field"),
        (rewritten(file, card=np.array(json.dumps({**card, "networks": []}))), "lacks an array"),
        (rewritten(file, **{"0/conv": None}), "lacks an array"),
        (rewritten(file, **{"0/out": out[:, :-1]}), "do not fit"),
        (rewritten(file, **{"0/out": np.full_like(out, np.nan)}), "not finite"),
    ):
        with pytest.raises(ArtifactError, match=message):
            ParameterPredictor.load(data)
    with pytest.raises(ArtifactError, match="there is no"):
        ParameterPredictor.load(file.with_name("missing.npz"))


@pytest.mark.slow
def test_nothing_is_unpickled(file):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    with pytest.raises(ArtifactError):
        ParameterPredictor.load(rewritten(file, **{"0/out": np.array([Evil()], dtype=object)}))


@pytest.mark.parametrize("path", sorted(HERE.glob("params-*.npz")), ids=lambda path: path.stem)
def test_committed_files_hold_for_algorithms_as_they_are(path):
    card = ParameterPredictor.load(path).card
    assert path == parameter_path(card.family)
    said = [(network, name) for network in card.networks for name in network.algorithms]
    assert all(BY_NAME[name].revision == network.revisions[name] for network, name in said)
    assert any(network.gains(name) for network, name in said)  # otherwise it is dead weight


# ---- training, and commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def direct_examples():
    """Examples for the C kernel `direct`, with made-up times: large groups are slow."""
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


@pytest.mark.slow
def test_predictions_for_the_c_kernel_are_valid_and_run(tmp_path, direct_examples):
    direct, p = BY_NAME["direct"], direct_examples[3].problem
    train_parameters(
        direct_examples, "cpu-run", tmp_path, {"direct": direct.revision}, replace(QUICK, steps=80), folds=2
    )  # fmt: skip
    params = ParameterPredictor.load(parameter_path("cpu-run", tmp_path)).params_for(p, direct)
    assert params is not None
    assert params["group"] < direct.space(p).default(p)["group"]
    x, weight = torch.randn(p.x_shape), torch.randn(p.weight_shape)
    found = direct.run_checked(x, weight, p, params)
    torch.testing.assert_close(found, torch.conv2d(x, weight, padding=p.pad_top), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_commands(tmp_path, direct_examples):
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
    arguments = ["train", str(path), *options]
    out = runner.invoke(app, arguments)
    assert out.exit_code == 0, out.output
    assert "direct: predicted" in out.output or "direct: keeps its default" in out.output
    card = ParameterPredictor.load(parameter_path("cpu-x", tmp_path)).card
    assert (card.networks[0].algorithms, card.data["problems"]) == (("direct",), 12)
    # What was measured anew decides, not the recorded times.
    live = tmp_path / "live.json"
    for gain, low, said in ((1.02, 1.001, "predicted"), (1.02, 0.999, "keeps"), (1.009, 1.008, "keeps")):
        live.write_text(json.dumps({"live": {"direct": {"gain": gain, "gain_low": low, "of_tuned": 1.0}}}))
        out = runner.invoke(app, [*arguments, "--measured", str(live), "--steps", "1"])
        assert f"direct: {said}" in out.output
        assert f"{gain:.3f} times" in out.output
    # Of two measurements the worse.
    better, worse = tmp_path / "better.json", tmp_path / "worse.json"
    for path_, gain in ((better, 1.05), (worse, 1.004)):
        path_.write_text(json.dumps({"live": {"direct": {"gain": gain, "gain_low": 1.001, "of_tuned": 1.0}}}))
    twice = ["--measured", str(better), "--measured", str(worse), "--steps", "1"]
    assert "direct: keeps its default; 1.004 times" in runner.invoke(app, [*arguments, *twice]).output
    live.write_text("{}")
    out = runner.invoke(app, [*arguments, "--measured", str(live)])
    assert (out.exit_code, "no predictions that were measured" in out.output) == (2, True)
    # Times of an older revision do not speak.
    write_recorded(path, recorded, {"revisions": {"direct": 0}})
    out = runner.invoke(app, ["evaluate", str(path)])
    assert out.exit_code == 2
    assert "there is no algorithm with parameters" in out.output
    out = runner.invoke(app, ["evaluate", str(path), "--target", "worst"])
    assert out.exit_code == 2
