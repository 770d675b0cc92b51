"""Search for the parameters of algorithms by measuring programs: what `convselect tune` does.

    programs.py     a program: an algorithm with its parameters; all programs of one problem
    features.py     the cost model's input features
    cost_model.py   gradient-boosted trees that predict a program's speed relative to the best of its problem
    evolution.py    mutation, crossover and selection by predicted speed
    search.py       one problem's search: which programs to measure next
    scheduler.py    which problem of a network is searched next
    runner.py       checks and times programs on this machine
    records.py      files of measured programs
    tuning.py       the tuning loop, and how its results are stored

The method is that of Ansor (Zheng et al., OSDI 2020, arXiv 2006.06762), on parameters of whole algorithms instead of
loop nests. A problem is a task; its programs are those of every algorithm that may be chosen for it.
"""
