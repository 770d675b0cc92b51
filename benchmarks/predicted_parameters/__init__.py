"""A study: a sequence network that predicts algorithms' parameters, after arXiv 2404.10162.

    tokens.py    problems and programs as sequences; training targets; coverage
    sequence.py  the network and its training
    decoding.py  inference in numpy: beam search among valid programs
    artifact.py  files of trained networks, `params-<family>.npz`, in this folder
    figures.py   comparison with simpler methods on held-out problems
    training.py  recorded programs -> figures and a file
    study.py     a made-up space whose best programs are known; predictions measured anew; latency

    python -m benchmarks.predicted_parameters evaluate | train | study

Not part of the package: predictions gained 1 to 2 % for one algorithm, and convselect does not use them. Figures are
in docs/tuning.md, "How predicted parameters compare".
"""
