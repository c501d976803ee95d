"""The README's tables of what was measured: python benchmarks/readme_table.py [moe | ep | train | ablation]."""

import csv
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
# (label, op, shape) of the kernels shown
KERNELS = [
    ("BF16 -> MXFP4 rows", "bf16_to_fp4_row", "32768x7168"),
    ("BF16 -> FP8 rows", "bf16_to_fp8_row", "32768x7168"),
    ("BF16 -> MXFP4 and FP8 rows, one read", "bf16_to_fp4_and_fp8_row", "32768x7168"),
    ("MXFP4 rows -> FP8 rows", "fp4_row_to_fp8_row", "32768x7168"),
    ("FP8 rows -> MXFP4 rows", "fp8_row_to_fp4_row", "32768x7168"),
    ("MXFP4 rows -> FP8 columns", "fp4_row_to_fp8_col", "32768x7168"),
    ("the same, 32 uneven experts", "fp4_row_to_fp8_col", "32768x7168/32"),
    ("BF16 -> FP8 columns", "bf16_to_fp8_col", "32768x7168"),
    ("FP8 rows -> FP8 columns", "fp8_row_to_fp8_col", "32768x7168"),
]
# (what an op is compared with, as the results call it, the row's label)
RIVALS = [
    ("bf16_to_fp4_row", "torchao", "against torch.compile'd {rival}"),
    ("fp4_row_to_fp8_row", "fp4_to_bf16, bf16_to_fp8_row", "against MXFP4 -> BF16 -> FP8 rows"),
    ("fp4_row_to_fp8_col", "fp4_to_bf16, t()", "against MXFP4 -> BF16 -> torch's transpose (1.5 ms) -> FP8"),
]


MOE_RESULTS = RESULTS / "moe_h200.json"
EP_RESULTS = RESULTS / "ep_h200.json"
RECIPES = ("BF16", "FP8", "MXFP4")
# label, kinds of parts whose times are added
MOE_PARTS = [
    ("GEMMs", ("GEMM Fprop", "GEMM Dgrad", "GEMM Wgrad")),
    ("quantize, convert", ("quantize", "convert")),
    ("SwiGLU", ("SwiGLU forward", "SwiGLU backward")),
    ("permute, unpermute", ("permute, unpermute",)),
]


TRAIN_RESULTS = RESULTS / "train_h200"
ABLATION_RESULTS = RESULTS / "ablation_h200"
ABLATION = RESULTS.parents[1] / "paper_figures/data/ablation.csv"  # paper_figures/fig_ablation.py computes it


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def table() -> str:
    """Markdown."""
    kernels, validation, simulator = load("kernels_h200.json"), load("validate_h200.json"), load("quantize_cpu.json")
    made = kernels["provenance"]
    copy = kernels["copy"]["tb_per_s"]
    lines = [
        f"{_machine(made)}, {made['date'][:10]}; "
        f"32768 x 7168; a copy in the same run moves {copy:.2f} TB/s (read + write). `{made['command']}`",
        "",
        "| kernel | time | rate | of the copy |",
        "| --- | --- | --- | --- |",
    ]
    for label, op, shape in KERNELS:
        (row,) = (r for r in kernels["ops"] if (r["op"], r["shape"]) == (op, shape))
        lines.append(f"| {label} | {row['us']:.0f} us | {row['tb_per_s']:.2f} TB/s | {row['of_copy']:.2f} |")
    lines += ["", "| in the same run | this | that | faster |", "| --- | --- | --- | --- |"]
    for op, start, label in RIVALS:
        (row,) = (
            r
            for r in kernels["comparisons"]
            if r["op"] == op
            and r["shape"] == "32768x7168"
            and r["rival"].startswith(start)
            and "MXFP8" not in r["rival"]
        )
        name = label.format(rival=row["rival"].removesuffix(", compiled"))
        lines.append(f"| `{op}` {name} | {row['op_us']:.0f} us | {row['us']:.0f} us | {row['ratio']:.1f}x |")
    (call,) = (c for c in kernels["overhead"] if c["call"] == "bf16_to_fp4_row")
    slowest = max(c["us"] for c in kernels["overhead"])
    dense = max(c["us"] for c in kernels["overhead"] if "ragged" not in c["call"] and "tile" not in c["call"])
    ours, theirs = simulator["ms"].values()
    rate = simulator["elements"] / 1e3
    cpu = load("kernels_cpu.json")
    (host,) = (r for r in cpu["ops"] if r["op"] == "bf16_to_fp4_row")
    bits, differing, seconds = (validation[name] for name in ("elements", "mismatches", "seconds"))
    machine, extra = simulator["provenance"]["machine"], simulator["extra_bytes_over_input"]
    lines += [
        "",
        f"- Bits on that H200: {bits:,} elements of all ops compared, {differing} differ",
        f"  (`mxsim validate --device cuda`, {seconds:.0f} s). compute-sanitizer (memcheck, racecheck,",
        "  initcheck, synccheck) is clean (`benchmarks/sanitize.py`).",
        f"- Python's share of a call, queue not full: {call['us']:.0f} us for `bf16_to_fp4_row`,",
        f"  {call['empty_us']:.0f} of them for `torch.empty`; up to {dense:.0f} us for other dense ops and",
        f"  {slowest:.0f} us for tiles and experts. The goal of 15 us is missed on that machine, where",
        "  an in-place add of torch takes 8 to 10.",
        f"- {machine}: the simulator quantizes to MXFP4 at {rate / ours:.0f} M elements/s, with {extra:.2f} of the",
        f"  input's bytes as extra memory; torchao {simulator['provenance']['torchao']} eager, in the same run, at",
        f"  {rate / theirs:.0f} (all bytes equal). The host build: {host['elements_per_s'] / 1e6:.0f} M elements/s.",
    ]
    return "\n".join(lines)


def _machine(made: Any) -> str:
    return f"{made['device']}, driver {made['driver']}, CUDA {made['cuda']}, torch {made['torch']}"


def moe_table(moe: Any) -> str:
    """Markdown of what `mxsim bench moe --json` wrote on a CUDA device."""
    made, shape = moe["provenance"], moe["shape"]
    balanced, *others = moe["routings"]
    lines = [
        f"{_machine(made)}, {made['date'][:10]}; "
        f"hidden {shape['hidden']}, intermediate {shape['intermediate']}, {shape['experts']} experts, "
        f"{shape['tokens']} tokens x top-{shape['top_k']} = {shape['rows']} rows. `{made['command']}`",
        "",
        "| expert layer, forward + backward | BF16 | FP8 | MXFP4 |",
        "| --- | --- | --- | --- |",
        _row("balanced routing", _steps(balanced)),
        *(_row(label, _parts(balanced, kinds)) for label, kinds in MOE_PARTS),
        _row("FP8 weights made inside the step", _steps(balanced, ", weights inside")),
        *(_row(f"routing {r['routing']}", _steps(r)) for r in others),
        _row("activations kept for backward", {r: f"{n / 1e6:.0f} MB" for r, n in balanced["saved_bytes"].items()}),
    ]
    peaks: dict[int, dict[str, str]] = {}
    for peak in moe["peaks"]:
        peaks.setdefault(peak["num_layers"], {})[peak["recipe"]] = f"{peak['peak'] / 1e9:.2f} GB"
    for num_layers, cells in peaks.items():
        what = f"{num_layers} layers" if num_layers > 1 else "one layer"
        lines.append(_row(f"peak memory of {what} above weights and gradients", cells))
    most = max(peaks)
    in_all = {p["recipe"]: p["resting"] + p["peak"] for p in moe["peaks"] if p["num_layers"] == most}
    cells = {recipe: f"{num_bytes / 1e9:.1f} GB" for recipe, num_bytes in in_all.items()}
    lines.append(_row(f"peak of {most} layers with weights, their FP8 copies and gradients", cells))
    lines += ["", *_figure_rows(moe["figures"])]
    one_read = [
        f"{figure['name'].split('-')[0]} {figure['value']:.2f}"
        + (f" ({figure['routing']})" if figure["routing"] else "")
        for figure in moe["figures"]
        if "target" not in figure and "one-read" in figure["name"]
    ]
    notes = []
    if one_read:
        notes.append(
            "- Against one kernel that reads BF16 once and writes FP8 rows and columns, quantization + conversion: "
            f"{', '.join(one_read)}."
        )
    if any(part["key"].startswith("dense.fused") for part in moe["dense"]):
        notes.append(
            f"  That kernel is slow; one at the rate of BF16 -> FP8 rows would take {_one_read_us(moe):.0f} us, and "
            f"the ratios would be {_one_read_ratios(moe)} (computed, not measured)."
        )
    against_faster = [f for f in moe["figures"] if f["routing"] == "balanced" and "target" not in f]
    notes += [f"- {f['name']}: {f['value']:.2f}." for f in against_faster if f["name"].startswith("FP8 grouped Wgrad")]
    bound = [f"{s['recipe']} ({r['routing']})" for r in moe["routings"] for s in r["steps"] if s.get("is_host_bound")]
    notes += [f"- Bound by the host: {', '.join(bound)}."] if bound else []
    return "\n".join([*lines, "", *notes] if notes else lines)


def ep_table(ep: Any) -> str:
    """Markdown of what `mxsim bench ep --json` wrote on GPUs: its largest batch."""
    made = ep["provenance"]
    tokens = max(row["tokens"] for row in ep["layer"])
    dispatch = {r["recipe"]: r for r in ep["dispatch"] if r["tokens"] == tokens and r["num_chunks"] == 1}
    layer = {row["recipe"]: row for row in ep["layer"] if row["tokens"] == tokens}
    lines = [
        f"{_machine(made)}, {made['backend']}, {made['date'][:10]}; {ep['shape']}; {tokens} tokens a GPU. "
        f"`{made['command']}`",
        "",
        f"| expert parallelism over {ep['ranks']} GPUs | BF16 | FP8 | MXFP4 |",
        "| --- | --- | --- | --- |",
        _row("bytes of a row", {r: str(d["row_bytes"]) for r, d in dispatch.items()}),
        _row(
            "forward dispatch: all-to-all", {r: f"{d['parts']['all-to-all'] / 1e3:.2f} ms" for r, d in dispatch.items()}
        ),
        _row("with quantize, pack, regroup and convert", {r: f"{d['us'] / 1e3:.2f} ms" for r, d in dispatch.items()}),
        _row("layer, forward + backward", {r: f"{row['us'] / 1e3:.0f} ms" for r, row in layer.items()}),
        _row("activations kept for backward", {r: f"{row['kept_bytes'] / 1e9:.2f} GB" for r, row in layer.items()}),
        _row("peak memory above weights", {r: f"{row['peak_bytes'] / 1e9:.1f} GB" for r, row in layer.items()}),
        "",
        *_figure_rows(ep["figures"]),
    ]
    smaller = [f for f in ep["figures"] if "target" not in f and f["name"].startswith("layer forward + backward")]
    notes = [f"{f['name'].removeprefix('layer forward + backward, ')} {f['value']:.2f}" for f in smaller]
    return "\n".join([*lines, "", f"- The layer at other sizes: {'; '.join(notes)}."] if notes else lines)


def _figure_rows(figures: Any) -> list[str]:
    """A table of the figures that have a target."""
    lines = ["| figure | measured | at least | aim | |", "| --- | --- | --- | --- | --- |"]
    for figure in figures:
        if "target" in figure:
            target = figure["target"]
            name = _name(figure) + (f", the paper {figure['paper']}" if "paper" in figure else "")
            bounds = f"{target['bound']:g} | {target['aim']:g} | {_VERDICTS[target['verdict']]}"
            lines.append(f"| {name} | {figure['value']:.3f} | {bounds} |")
    return lines


def _one_read_us(moe: Any) -> float:
    """What one read of the rows and both results would take at the rate of `bf16_to_fp8_row`."""
    dense = {part["key"]: part for part in moe["dense"]}
    (num_bytes,) = {part["bytes"] for key, part in dense.items() if key.startswith("dense.fused")}
    return float(num_bytes / dense["dense.fp8.rows"]["tb_per_s"] / 1e6)


def _one_read_ratios(moe: Any) -> str:
    us = {part["key"]: part["us"] for part in (*moe["dense"], *moe["routings"][0]["parts"])}
    grouped = us["tokens.fp4"] + us["x.fp4.rows"] + us["x.fp4.cols"]
    dense = us["dense.fp4.rows"] + us["dense.fp4.cols"]
    return f"{_one_read_us(moe) / grouped:.2f} grouped and {_one_read_us(moe) / dense:.2f} dense"


def train_table(folder: Path) -> str:
    """Markdown of the runs of `mxsim train` in a folder. BF16 is compared with its seed 0, the others seed by seed."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*/run.json"))]
    runs = {(run["config"]["recipe"], run["config"]["seed"]): run for run in documents}
    first = runs["bf16", 0]
    made, config = first["provenance"], first["config"]
    tokens = config["steps"] * config["batch_size"] * config["sequence_length"]
    text = first["corpus"]["train_bytes"] + first["corpus"]["validation_bytes"]
    lines = [
        f"{_machine(made)}, {made['date'][:10]}; "
        f"{first['num_parameters'] / 1e6:.0f} M parameters ({first['num_active_parameters'] / 1e6:.0f} M active), "
        f"{tokens / 1e6:.0f} M tokens (bytes) of a text of {text / 1e6:.0f} MB. `{made['command']}`, and so on.",
        "",
        f"| validation loss, mean of the last {first['final_steps']} steps | BF16 | FP8 | MXFP4 |",
        "| --- | --- | --- | --- |",
    ]
    seeds = sorted({seed for _, seed in runs})
    deviations: dict[str, list[float]] = {}
    for seed in seeds:
        cells = {}
        for recipe in RECIPES:
            run, base = runs[recipe.lower(), seed], first if recipe == "BF16" else runs["bf16", seed]
            percent = 100 * (run["final_validation_loss"] / base["final_validation_loss"] - 1)
            cells[recipe] = f"{run['final_validation_loss']:.4f}"
            if run is not first:
                deviations.setdefault(recipe, []).append(percent)
                cells[recipe] += f" ({percent:+.2f} %)"
        lines.append(_row(f"seed {seed}", cells))
    means = {recipe: f"{fmean(found):+.2f} %" for recipe, found in deviations.items() if recipe != "BF16"}
    lines.append(_row("mean deviation from BF16", means))
    speeds = {r: fmean(runs[r.lower(), seed]["median_tokens_per_s"] for seed in seeds) for r in RECIPES}
    lines.append(_row("tokens a second", {recipe: f"{speed:,.0f}" for recipe, speed in speeds.items()}))
    return "\n".join(lines)


def ablation_table(path: Path, folder: Path) -> str:
    """Markdown of the table of the exhibit; folder: of its runs."""
    run = json.loads((folder / "mxfp4-seed0" / "run.json").read_text())
    made, config = run["provenance"], run["config"]
    tokens = config["steps"] * config["batch_size"] * config["sequence_length"]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def percent(recipe: str, quantity: str, seed: str = "0", *, of: str = "all", num_draws: str = "1") -> float:
        wanted = {"recipe": recipe, "quantity": quantity, "seed": seed, "of": of, "num_draws": num_draws}
        (value,) = (r["value"] for r in rows if wanted.items() <= r.items() and r["choices"] != "reference")
        return float(value)

    draws = {r["recipe"]: r["num_draws"] for r in rows if r["num_draws"] != "1"}
    (noise,) = (float(r["value"]) for r in rows if r["quantity"] == "standard deviation of a run")
    lines = [
        f"{_machine(made)}, {made['date'][:10]}; {run['num_parameters'] / 1e6:.0f} M parameters, "
        f"{tokens / 1e6:.0f} M tokens a run, two seeds of each recipe. `{made['command']}`, and so on. "
        f"Noise: a run's loss has a standard deviation of {noise:.2f} % around what its recipe and its seed have in "
        f"common, two standard errors of a mean against BF16 are {2 * noise:.2f} %.",
        "",
        "| recipe | `--recipe` | loss against BF16: seed 0 | seed 1 | mean | gradient's error | in the experts' w1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for recipe, (question, answer) in {r["recipe"]: (r["question"], r["answer"]) for r in rows}.items():
        if question.startswith("noise"):
            continue
        label = answer if question == "presets" else f"{question}: {answer}"
        label += " alone" if question.startswith("stored") else ""
        losses = [percent(recipe, "validation loss deviation", seed, of="loss") for seed in ("0", "1", "mean")]
        cells = ["", "", ""] if recipe == "bf16" else [f"{value:+.2f} %" for value in losses]
        for of in ("all", "routed w1"):
            cell = f"{percent(recipe, 'gradient error', of=of):.1f} %"
            if recipe in draws:
                cell += f" ({percent(recipe, 'gradient error', of=of, num_draws=draws[recipe]):.1f} %)"
            cells.append(cell)
        lines.append(f"| {' | '.join([label, f'`{recipe}`', *cells])} |")
    another = percent("another batch", "gradient error")
    lines += [
        "",
        "Loss: validation, mean of the last 5 % of the steps. Gradient's error: |g - r| / |r|, g the gradient of all "
        "weights, or of the routed experts' w1, r that in FP32, at the weights of BF16 after 400 steps, on 65,536 "
        f"tokens; in brackets that of the mean of {min(draws.values())} draws. Another batch's gradient is "
        f"{another:.0f} % away.",
    ]
    return "\n".join(lines)


_VERDICTS = {"aim": "aim reached", "reached": "reached", "missed": "missed"}


def _row(label: str, cells: dict[str, str]) -> str:
    return f"| {label} | {' | '.join(cells.get(recipe, '') for recipe in RECIPES)} |"


def _steps(routing: Any, suffix: str = "") -> dict[str, str]:
    times = {step["recipe"]: f"{step['us'] / 1e3:.2f} ms" for step in routing["steps"]}
    return {recipe: times.get(recipe + suffix, "") for recipe in RECIPES}


def _parts(routing: Any, kinds: tuple[str, ...]) -> dict[str, str]:
    found = {recipe: sum(routing["sums_us"][recipe].get(kind, 0.0) for kind in kinds) for recipe in RECIPES}
    return {recipe: f"{us / 1e3:.2f} ms" for recipe, us in found.items() if us}


def _name(figure: Any) -> str:
    return figure["name"] + (f" ({figure['routing']})" if figure["routing"] else "")


if __name__ == "__main__":
    if sys.argv[1:] == ["moe"]:
        print(moe_table(json.loads(MOE_RESULTS.read_text())))
    elif sys.argv[1:] == ["ep"]:
        print(ep_table(json.loads(EP_RESULTS.read_text())))
    elif sys.argv[1:] == ["train"]:
        print(train_table(TRAIN_RESULTS))
    elif sys.argv[1:] == ["ablation"]:
        print(ablation_table(ABLATION, ABLATION_RESULTS))
    else:
        print(table())
