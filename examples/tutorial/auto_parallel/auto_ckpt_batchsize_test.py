"""One model on one device with larger and larger batches: recomputation makes room for them."""

from __future__ import annotations

from parts import MB, build_parser, count, image_work, peak_and_seconds, planner_of, size

BATCH_SIZES = (512, 1024, 2048)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--model", choices=("resnet50", "resnet152"), default="resnet152")
    parser.add_argument("--memory", type=size, default="130 GiB", help="what a step may need (%(default)s)")
    parser.add_argument("--batch_sizes", type=count, nargs="+", default=BATCH_SIZES)
    args = parser.parse_args()
    lines = []
    for images in args.batch_sizes:
        planner = planner_of(image_work(args.model, images), args.device)
        try:
            peak, seconds = peak_and_seconds(planner, planner.plan(args.memory))
        except ValueError as error:  # even the smallest plan is too large
            lines.append(f"batch_size: {images}, {error}")
            continue
        lines.append(
            f"batch_size: {images}, peak memory: {peak / MB:.3f} MB,"
            f" through put: {images / seconds:.3f} images/s"
        )
    print("===============benchmark summary================")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
