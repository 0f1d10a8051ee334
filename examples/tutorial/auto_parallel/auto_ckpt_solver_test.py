"""One model under fifteen budgets: the memory and the time of its step, as lines and as a picture."""

from __future__ import annotations

from parts import MB, build_parser, count, gpt2_work, image_work, peak_and_seconds, planner_of

from colossalai.auto_parallel.checkpoint import CurvePoint, plot_curve

BUDGETS = 15


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--model", choices=("resnet50", "gpt2"), default="resnet50")
    parser.add_argument("--batch_size", type=count, default=None, help="128 images, or 8 sequences")
    parser.add_argument("--budgets", type=count, default=BUDGETS, help="how many (%(default)s)")
    args = parser.parse_args()
    if args.model == "gpt2":
        work = gpt2_work(args.batch_size or 8)
    else:
        work = image_work(args.model, args.batch_size or 128)
    planner = planner_of(work, args.device)
    low, high = planner.least[2], planner.whole
    found = []
    for number in range(args.budgets):
        budget = low + (high - low) * number // max(1, args.budgets - 1)
        plan = planner.plan(budget)
        found.append(CurvePoint(budget, *peak_and_seconds(planner, plan)))
    print("==============benchmark summary==============")
    for budget, peak, seconds in found:
        print(
            f"memory budget: {budget / MB:.3f} MB, peak memory: {peak / MB:.3f} MB,"
            f" step time: {seconds * 1e3:.3f} MS"
        )
    plot_curve(found, f"{args.model}_benchmark.png")


if __name__ == "__main__":
    main()
