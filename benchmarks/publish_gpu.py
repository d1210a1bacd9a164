"""The figures of docs/cuda.md: calls, batch updates and a policy on one GPU, from a result file."""

from __future__ import annotations

from typing import Any

from benchmarks import results

Line = dict[str, Any]
Cells = dict[tuple[str, str], Line]

CALLS = {
    "gpu-latency/1-element": "`torch.add` of 1 element, until the GPU is done",
    "gpu-latency/1-element, with MPS": "the same with MPS",
    "gpu-bandwidth/1MB": "1 MB there and back, each way",
    "gpu-bandwidth/100MB": "100 MB there and back, each way",
    "gpu-bandwidth-mps/100MB": "the same with MPS",
    "gpu-bandwidth/1000MB": "1000 MB there and back, each way",
    "gpu-bandwidth-mps/1000MB": "the same with MPS",
}
UPDATES = {  # the entries of Telegrad and of torch RPC that do the same
    "`telegrad.ps`": ("telegrad.ps", ""),
    "the tutorial's way, through the CPU": ("telegrad", "torch"),
    "the tutorial's code with CUDA tensors": ("telegrad cuda", "torch cuda"),
    "in one process, without calls": ("one process", ""),
}
TUTORIAL = {
    "tutorial/program": "the tutorial's program, unmodified: six rounds, with its start",
    "tutorial/round": "one round of it",
    "batch-update/cuda/5-trainers": "a round of the tutorial's code after two rounds of warm-up",
}
CARTPOLE = {
    "`@telegrad.batched`": ("telegrad.batched", ""),
    "the tutorial's code": ("telegrad.by_hand", "torch.batched"),
    "one by one": ("", "torch.single"),
}


def figures(run: dict[str, Any], lines: list[Line]) -> str:
    """Return the block of the page: how it was measured, and the tables."""
    machine, torch = run["machine"], run["versions"]["torch"].partition("+")[0]
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    own = [
        line for line in lines if line["case"].startswith(("gpu-", "tutorial/")) and line["rounds"]
    ]
    rounds = sorted({len(line["rounds"]) for line in own})
    times = " to ".join(map(str, dict.fromkeys([rounds[0], rounds[-1]]))) if rounds else "0"
    several = "round" if times == "1" else "rounds"
    text = f"One {machine['gpu']}, {machine['cores']} cores, torch {torch}; medians of {times} {several}."
    return f"{text}\n\n{calls(cells)}{updates(cells)}{tutorial(cells)}{cartpole(cells)}"


def calls(cells: Cells) -> str:
    rows = [
        f"| {label} | {shown(cells, case, 'telegrad')} | {shown(cells, case, 'torch')} "
        f"| {ratio(cells, case, 'telegrad', 'torch')} | {shown(cells, case, 'one process')} |"
        for case, label in CALLS.items()
        if (case, "telegrad") in cells
    ]
    head = ["| | Telegrad | torch RPC | ratio | one process |", "|---|---:|---:|---:|---:|"]
    return "\n".join([*head, *rows, "\n"])


def updates(cells: Cells) -> str:
    """Return a table of the batch updates: a row for each way and number of trainers."""
    trainers = sorted(
        {int(case.split("/")[1].split("-")[0]) for case, _ in cells if case.startswith("gpu-ps/")}
    )
    rows = []
    for number in trainers:
        case = f"gpu-ps/{number}-trainers"
        rows += [
            f"| {number} trainers: {label} | {shown(cells, case, ours)} | {shown(cells, case, theirs)} "
            f"| {ratio(cells, case, ours, theirs)} |"
            for label, (ours, theirs) in UPDATES.items()
            if (case, ours) in cells or (case, theirs) in cells
        ]
    if not rows:
        return ""
    return (
        "A batch update of ResNet-50 with precomputed gradients on the GPU: every trainer sends its\n"
        "gradients and receives the new model. PyTorch's tutorial copies both to the CPU and back on\n"
        "the way. Its code can also send CUDA tensors, with a device map and a server on the GPU.\n\n"
        "| | Telegrad | torch RPC | ratio |\n|---|---:|---:|---:|\n" + "\n".join(rows) + "\n\n"
    )


def tutorial(cells: Cells) -> str:
    rows = [
        f"| {label} | {shown(cells, case, 'telegrad')} | {shown(cells, case, 'torch')} "
        f"| {ratio(cells, case, 'telegrad', 'torch')} |"
        for case, label in TUTORIAL.items()
        if (case, "telegrad") in cells or (case, "torch") in cells
    ]
    if not rows:
        return ""
    return (
        "The tutorial's program computes the gradients too. It has five trainers, and runs on\n"
        "Telegrad with `telegrad run parameter_server.py`:\n\n"
        "| | Telegrad | torch RPC | ratio |\n|---|---:|---:|---:|\n" + "\n".join(rows) + "\n\n"
    )


def cartpole(cells: Cells) -> str:
    case = "gpu-cartpole/10-observers"
    rows = [
        f"| {label} | {shown(cells, case, ours)} | {shown(cells, case, theirs)} |"
        for label, (ours, theirs) in CARTPOLE.items()
        if (case, ours) in cells or (case, theirs) in cells
    ]
    if not rows:
        return ""
    return (
        "CartPole with 10 observers and the policy on the GPU:\n\n"
        "| | Telegrad | torch RPC |\n|---|---:|---:|\n" + "\n".join(rows) + "\n\n"
    )


def shown(cells: Cells, case: str, peer: str) -> str:
    line = cells.get((case, peer))
    return f"{results.number(line['median'])} {line['unit']}" if line else ""


def ratio(cells: Cells, case: str, ours: str, theirs: str) -> str:
    line, other = cells.get((case, ours)), cells.get((case, theirs))
    if line is None or other is None:
        return ""
    return f"{results.number(results.quotient(line['median'], other['median'], line['better'] == 'higher'))}x"
