def corrections(model, device="cpu"): return []
def remember_correction(*a): pass
