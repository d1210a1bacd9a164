#!/usr/bin/env python3
"""Run PyTorch's own RPC test suites, from the installed torch wheel, against Telegrad (or against
torch itself).

run.py                                  the public tests: the score
run.py -k async_function -k timeout     those whose Suite.test contains one of these
run.py --capability "dist autograd"     one area
run.py --one RpcTest.test_add           one test, with all its output
run.py --out results.json               keep the results, and the logs of failed tests beside them
run.py --failed-from results.json       only what did not pass then
run.py --list --all                     what there is, with labels
"""

import argparse
import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import catalog
import gpus
import report
import results
from catalog import EXCLUDED, INTERNAL, PUBLIC, UNCATALOGUED, Test

# this checkout is what is tested, whatever is installed
SOURCE = Path(__file__).resolve().parents[2] / "src"
LABELS = {"public": {PUBLIC}, "internal": {INTERNAL}, "all": {PUBLIC, INTERNAL, UNCATALOGUED}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "-k",
        action="append",
        default=[],
        metavar="SUBSTRING",
        help="part of Suite.test; may be repeated",
    )
    add(
        "--capability",
        action="append",
        default=[],
        metavar="NAME",
        help="part of its name; may be repeated",
    )
    add("--suite", action="append", default=[], metavar="NAME", help="may be repeated")
    for name in LABELS:
        add(f"--{name}", dest="labels", action="store_const", const=name, help=f"run {name} tests")
    add(
        "--failed-from",
        type=Path,
        metavar="RESULTS",
        help="only tests that did not pass in this results file",
    )
    add("--one", metavar="SUITE.TEST", help="run one test, whatever its label, and show its output")
    add("--list", action="store_true", help="list the tests and stop")
    add("--against", choices=["telegrad", "torch"], default="telegrad")
    add(
        "--start",
        choices=["fork", "spawn"],
        help="how ranks start (default: spawn if there is a GPU, else fork)",
    )
    add("-j", dest="at_once", type=int, default=1, metavar="N", help="tests at a time")
    add("--limit", type=int, default=100, metavar="SECONDS", help="for one test (default: 100)")
    add(
        "--out",
        type=Path,
        metavar="RESULTS",
        help="write the results here (JSON), logs of failed tests beside it",
    )
    add("--min-score", type=int, metavar="N", help="fail only if fewer public tests pass")
    return parser.parse_args()


def select(tests: list[Test], args: argparse.Namespace) -> list[Test]:
    """Different options narrow the selection, repeats of one widen it."""
    labels = LABELS[args.labels or ("all" if args.failed_from else "public")]
    if args.list and args.labels == "all":
        labels = {*labels, EXCLUDED}
    wanted = results.failed(args.failed_from) if args.failed_from else {test.id for test in tests}
    return [
        test
        for test in tests
        if test.label.name in labels
        and test.id in wanted
        and (not args.k or any(part in test.id for part in args.k))
        and (
            not args.capability
            or any(part.lower() in test.label.capability.lower() for part in args.capability)
        )
        and (not args.suite or test.suite in args.suite)
    ]


def prepare(args: argparse.Namespace) -> None:
    """Everything that must be settled before torch is imported."""
    start = args.start or ("spawn" if gpus.present() else "fork")
    os.environ.update(
        CONFORMANCE_AGAINST=args.against, CONFORMANCE_START=start, CONFORMANCE_LIMIT=str(args.limit)
    )
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    os.environ.update(
        dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")
    )
    gpus.hide()
    warnings.simplefilter("ignore")
    sys.path.insert(1, str(SOURCE))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests in flight are ended


def execute(tests: list[Test], args: argparse.Namespace) -> list[results.Row]:
    import jobs  # noqa: PLC0415  it imports torch, after `prepare`

    jobs.preload({test.suite for test in tests})
    logs = args.out and args.out.with_name(args.out.stem + "_logs")
    if logs:
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
    rows: list[results.Row] = []
    known = {test.id: test for test in tests}
    with closing(jobs.run(tests, args.limit, args.at_once, foreground=bool(args.one))) as finished:
        try:
            for result, log in finished:
                rows.append((known[result.id], result))
                print(f"[{len(rows):3}/{len(known)}] {result}", flush=True)
                if logs and not result.ok:
                    (logs / f"{result.id}.log").write_text(log, encoding="utf-8")
        except KeyboardInterrupt:
            print("interrupted")
    return rows


def main() -> int:
    args = arguments()
    everything = catalog.load()
    tests = (
        [test for test in everything if test.id == args.one]
        if args.one
        else select(everything, args)
    )
    if args.list:
        print(*tests, f"{len(tests)} tests", sep="\n")
        return 0
    if not tests:
        print("no such test")
        return 2
    prepare(args)
    start = time.monotonic()
    rows = execute(tests, args)
    print("\n" + report.text(rows, everything))
    if args.out:
        about = {
            "against": args.against,
            "torch": version("torch"),
            "seconds": round(time.monotonic() - start),
        }
        results.save(args.out, rows, **about)
    if args.min_score is not None:
        return int(results.score(rows) < args.min_score)
    return int(len(rows) < len(tests) or not all(result.ok for _, result in rows))


if __name__ == "__main__":
    sys.exit(main())
