"""Search for the parameters of algorithms by measuring programs: what `convselect tune` does.

    programs.py     a program: an algorithm with its parameters; all programs of one problem
    features.py     what the cost model sees of a program
    cost_model.py   gradient-boosted trees that predict how fast a program is, beside the best of its problem
    evolution.py    mutation, crossover and selection by predicted speed
    search.py       one problem's search: which programs to measure next
    scheduler.py    which problem of a network is searched next
    runner.py       programs checked and timed here, or looked up among recorded times
    records.py      files of measured programs
    tuning.py       the loop, and what is kept of it

The method is that of Ansor (Zheng et al., OSDI 2020, arXiv 2006.06762), on parameters of whole algorithms instead of
loop nests. A problem is a task; its programs are those of every algorithm
that may be chosen for it.
"""
