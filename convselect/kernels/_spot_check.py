class Finding: right=True
def limit(algorithm, problem): return 1.0
def spot_check(*a, **k): return None
