"""`appliance simulate`: what the scheduler would do with a trace, on devices we do not own. Needs no box, unless one is
asked for its costs."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import output
from appliance.cli.command import API_KEY, DATA_DIR, OUTPUT, URL, Format, examples, group, open_session
from appliance.cli.errors import BadUsage
from appliance.cli.mode.request import PolicyKind

app = group("What the scheduler would do with a trace.")


@app.command(
    epilog=examples(
        "appliance simulate --trace azure2023_conv.csv.gz",
        "appliance simulate --trace conv.csv --scale 3 --plot day.svg",
        "appliance simulate --trace conv.csv --jobs philly_jobs.csv.gz --nodes 4 -o json",
        "appliance simulate --trace conv.csv --policy split --train 6 --no-static",
        "appliance simulate --trace conv.csv --from-box      hand-overs cost what they cost on this box",
    )
)
def simulate(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(metavar="FILE", help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens.")],
    jobs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV: timestamp, duration, num_gpus. Without: one job that never ends."),
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, max=10_000)] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, max=64)] = 8,
    policy: Annotated[PolicyKind, typer.Option(metavar="MODE")] = "auto",
    train: Annotated[int | None, typer.Option(metavar="N", min=0, help="With split: devices for training.")] = None,
    floor: Annotated[int, typer.Option(metavar="N", min=0, help="Devices that serving keeps in any case.")] = 0,
    min_replicas: Annotated[
        int, typer.Option(metavar="N", min=0, help="Replicas that always stay awake, as with `model deploy`.")
    ] = 0,
    scale: Annotated[float, typer.Option(metavar="X", help="Multiplies the load of the trace.")] = 1.0,
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="Target: time to first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="Target: time per further token.")] = 0.1,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibrate the engine model from a Vidur layer profile.")
    ] = None,
    static: Annotated[bool, typer.Option("--static/--no-static", help="Also run every static split.")] = True,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the run, .png or .svg.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
    from_box: Annotated[
        bool, typer.Option("--from-box", help="Use the times of the box's last 1,000 hand-overs.")
    ] = False,
    url: URL = None,
    api_key: API_KEY = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Run the box's own scheduler on a trace in virtual time, beside an oracle and every static split.

    Engines and jobs are simulated; plan, steps and loop are the ones that run a box.
    """
    # Fenced: the scheduler and its settings would double the time of every other command's `--help`.
    from scheduler.core.config import SchedulerConfig
    from scheduler.core.errors import SchedulerError
    from scheduler.core.workload import Policy
    from scheduler.simulator.engine import EngineModel
    from scheduler.simulator.recorded import recorded
    from scheduler.simulator.simulate import Setup, run_policy
    from scheduler.simulator.simulate import simulate as run
    from scheduler.simulator.trace import read_jobs, read_requests

    # Before hours of a trace are lived through, not after.
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise BadUsage(f"--plot is {plot}; expected a file that ends with .png or .svg")
    if plot is not None and not plot.parent.is_dir():
        raise BadUsage(f"--plot is {plot}; its folder {plot.parent} does not exist")
    _check_devices(policy, nodes * gpus_per_node, {"--train": train, "--floor": floor, "--min-replicas": min_replicas})
    handovers: list[dict[str, Any]] = []
    if from_box:
        session = open_session(ctx, url, api_key, data_dir, output_format)
        handovers = session.client.get("/admin/v1/handovers", limit=1000)["data"]
    costs = recorded(handovers)
    try:
        wanted = Policy(policy, train, floor)
        stamped = read_requests(trace, scale=scale, seed=seed)
        requests = stamped.spread(seed)
        listed = None
        if jobs is not None:
            listed = read_jobs(jobs, within_s=requests.horizon_s, max_devices=nodes * gpus_per_node)
        setup = Setup(
            requests,
            jobs=listed,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            slo_ttft_s=slo_ttft,
            slo_tpot_s=slo_tpot,
            min_replicas=min_replicas,
            engine=EngineModel() if profile is None else EngineModel.from_profile(profile),
            seed=seed,
            times=costs.times,
            config=costs.config(SchedulerConfig()),
        )
        with output.progress("simulating") as meter:
            # A process takes half a second to start, as long as some thousand requests.
            processes = len(os.sched_getaffinity(0)) if len(requests) >= 5000 else 1
            result, figures = run(
                setup, wanted, static=static, processes=min(processes, 9), progress=lambda text: meter.update(text)
            )
            result["clock_s"] = stamped.clock_s
            if from_box:
                result["verb_times_s"], result["verb_times_from_steps"] = asdict(costs.times), dict(costs.steps)
            if stamped.clock_s:
                raw = run_policy(replace(setup, requests=stamped), wanted, lambda share: meter.update("as stamped"))
                result["as_stamped"] = raw.to_json()
        if plot is not None:
            from scheduler.simulator.plot import plot as draw  # fenced: matplotlib

            draw(setup, figures, f"{trace.name} x{scale:g} on {setup.devices} devices, mode {policy}", plot)
    except SchedulerError as error:
        raise BadUsage(str(error)) from error
    _show(result, output_format)


def _check_devices(policy: str, devices: int, counts: dict[str, int | None]) -> None:
    """As the box would refuse them. Raises BadUsage."""
    if policy == "split" and counts["--train"] is None:
        raise BadUsage("the mode split needs --train N: how many devices training may have")
    if policy != "split" and counts["--train"] is not None:
        raise BadUsage(f"--train belongs to the mode split, not to {policy}")
    for option, count in counts.items():
        if count is not None and count > devices:
            raise BadUsage(f"{option} is {count}; there are {devices} devices (--nodes times --gpus-per-node)")


def _show(result: dict[str, Any], output_format: Format) -> None:
    if output_format == "json":
        output.print_json(result)
        return

    def row(name: str, r: dict[str, Any], ratio: float | None) -> list[object]:
        return [
            name,
            f"{r['requests_served']:,}",
            f"{100 * r['slo_attainment']:.2f} %",
            "" if r["ttft_p50_s"] is None else f"{r['ttft_p50_s']:.3f}",
            "" if r["ttft_p95_s"] is None else f"{r['ttft_p95_s']:.3f}",
            f"{r['training_gpu_hours']:.2f}",
            r["handovers"],
            "" if ratio is None else f"{100 * ratio:.1f} %",
        ]

    columns = ["", "served", "within targets", "TTFT p50 s", "p95 s", "training GPU-h", "hand-overs", "of oracle"]
    rows = [row(f"mode {result['policy']}", result, result["oracle_ratio"])]
    if result["clock_s"]:
        output.say(
            f"The trace's clock ticks every {result['clock_s']:g} s; arrivals are spread over each tick. "
            "The row `as stamped` has them where the trace does."
        )
        rows.append(row(f"mode {result['policy']}, as stamped", result["as_stamped"], None))
    if "verb_times_s" in result:
        output.say(_costs(result))
    for split in result["static"]:
        rows.append(row(f"static {split['serve_devices']} serve / {split['train_devices']} train", split, None))
    output.draw(output.table(columns, rows, empty="nothing"))


def _costs(result: dict[str, Any]) -> str:
    times, steps = result["verb_times_s"], result["verb_times_from_steps"]
    if not steps:
        return "The box has recorded too few hand-overs; the times are the defaults."
    found = ", ".join(f"{name.removesuffix('_s')} {times[name]:.2g} s ({count} steps)" for name, count in steps.items())
    return f"From the box: {found}. Other times are the defaults."
