def trusted(algorithm, problem):
    return problem.device == "cpu"
