"""The digits with a gate: the other folds are trained only if the first one is good enough."""

import workload

from memfit.pipeline import Stage, Stop, Workload


class Params(workload.Params):
    least_accuracy: float = 0.5


def check(ctx, params):
    accuracy = ctx["fold"].result["accuracy"]
    if accuracy < params.least_accuracy:
        raise Stop(f"fold {ctx['fold'].unit} has an accuracy of {accuracy:.2f}", exit_code=11)


GATE = Stage("check", check, needs=("fold",), holds="fold", reads=("least_accuracy",))
GATED = Workload(Params, stages=(*workload.DIGITS.stages, GATE))
