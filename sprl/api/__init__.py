"""The Python interface that `import sprl` offers (docs: Python interface).

settings    keyword arguments become the settings of a run
inputs      rows, rewards and environments become the inputs of a run
loaded      `load`: a model with its weights
sampler     a way to sample from it
rollouts    samples, grading, `side_by_side`
ledger      the mismatch by cause
figures     pictures of these
training    `fit`: a whole run
"""
