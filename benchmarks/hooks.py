"""What hooks cost: calibration, masks and gradient clamps beside the same model without, and torch's own beside.

`ratio` is the median over rounds of the time with hooks over the time without, the two timed alternately in one run;
`low` and `high` are the 10th and 90th percentile. One thread, float32, eager, random weights. Names begin with
`calibrate` (the statistics collector), `mask`, `gradient`, `single` (weight and gradient masks of
channels beside those of single weights), or `torch` (the peers: six naive reductions, and torch.nn.utils.prune).

    python benchmarks/hooks.py [--json] [--only PREFIX] [--rounds N] [--threads N] [--keep]
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain

import calibrate_cases
import mask_cases
import torch
from common import keep, shown_as_made


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--only", default="", metavar="PREFIX", help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=40, help="of a forward pass; a third as many training steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/hooks.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = chain(calibrate_cases.rows(options.rounds, options.only), mask_cases.rows(options.rounds, options.only))
    rows = shown_as_made(cases, options, parser, "case")
    if options.keep:
        ratio = "median; low and high: 10th and 90th percentile"
        setting = {"threads": options.threads, "dtype": "float32", "ratio": ratio}
        print(keep("hooks", rows, setting), file=sys.stderr)


if __name__ == "__main__":
    main()
