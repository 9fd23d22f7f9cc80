"""Five stages of little work: a list, its squares, a sum, a gate on the first square, and a last word."""

import chain_help
from pydantic import BaseModel, ConfigDict

from memfit.pipeline import Context, Stage, Stop, Workload


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    count: int = 3
    scale: int = 1
    offset: int = 0
    limit: int = 1000
    unused: int = 0
    undeclared: bool = False


def listed(context: Context, params: Params) -> dict:
    """The numbers."""
    context.save("numbers", list(range(params.count)))
    return {"items": [{"item": number, "value": number + 1} for number in range(1, params.count + 1)]}


def square(context: Context, params: Params) -> dict:
    # a comment
    if params.undeclared if context.unit["item"] < 0 else False:
        return {}
    found = chain_help.squared(context.unit["value"]) * params.scale
    (context.dir / "file.txt").write_text(str(found))
    context.save("file", context.dir / "file.txt")
    return {"square": found}


def gate(context: Context, params: Params) -> dict:
    first = context.units("square")
    if first[0].result["square"] > params.limit:
        raise Stop(f"{first[0].result['square']} is above {params.limit}", exit_code=11, result={"seen": len(first)})
    return {"seen": len(first)}


def summed(context: Context, params: Params) -> dict:
    numbers = context["listed"].json("numbers")
    return {"sum": sum(one.result["square"] for one in context.units("square")) + params.offset, "all": len(numbers)}


def last(context: Context, params: Params) -> dict:
    return {"seed": context.seed, "sum": context["summed"].result["sum"]}


CHAIN = Workload(
    params=Params,
    fingerprint=chain_help.data,
    stages=(
        Stage("listed", listed, reads=("count",)),
        Stage("square", square, each="item in listed.items", reads=("scale",)),
        Stage("gate", gate, needs=("square",), holds="square", reads=("limit",)),
        Stage("summed", summed, needs=("listed", "square"), after=("gate",), reads=("offset",)),
        Stage("last", last, needs=("summed",), reads=("@seed",)),
    ),
)
